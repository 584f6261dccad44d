"""Parts of bench_quants.py: the cases, the peers, the goals, and other launch parameters."""
