"""Exact all-reduce: matchmaking from peer records, one flat vector, the same bytes for everyone."""
