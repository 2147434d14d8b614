"""What users see of a run: figures for loggers, pictures, traces, the report page, and comparisons of sweeps.

Everything here reads what `RoundPipeStrategy.report` returns. The engine does not import this package.
"""
