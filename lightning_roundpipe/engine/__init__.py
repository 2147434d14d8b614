"""The engine: runs a window's microbatches over the workers, layer by layer. Read it in the order of `docs/engine.md`.

windows.py ──► step: slots, microbatches ──► microbatch: user code, calls, tape ──► executor on worker
                                                                 │
optimizer ◄── sums of gradients, bucket by bucket ◄──────────────┘
"""
