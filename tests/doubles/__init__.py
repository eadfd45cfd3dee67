"""Stand-ins for what no machine here has. Reached through PYTHONPATH, by tests alone."""
from pathlib import Path

# What a process needs to find the T20's torch_gcu. XLA's CPU code is compiled fast, not well.
T20 = {'PYTHONPATH': str(Path(__file__).parent),
       'XLA_FLAGS': '--xla_backend_optimization_level=0'}
