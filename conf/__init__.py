"""The configuration of ``roundpipe-train``, installed as the package ``lightning_roundpipe.conf``.

It is a package so that Hydra finds it as ``pkg://lightning_roundpipe.conf`` wherever the command is run from; a
relative ``config_path`` would work in a checkout and break once installed.
"""
