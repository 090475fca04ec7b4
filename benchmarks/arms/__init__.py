"""What is measured: one module per arm, run as `python -m benchmarks.arms.NAME FOLDER RANK SIZE` by `run_team`."""
