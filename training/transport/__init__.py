"""The transport gate: which network carried a run between its hosts, and the proof of it.

``evidence`` reads what NCCL said, ``counters`` what the devices moved, ``preflight`` what a worker has; ``verdict`` judges them, a pure function;
``gate`` is what a job calls, ``python -m training.transport judge`` what a person runs on logs. Standard library only. See docs/gate.md.
"""
