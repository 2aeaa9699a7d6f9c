"""The engine as a process of its own: `python -m headrace.engine.process`."""
