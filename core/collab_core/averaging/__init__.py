"""Exact all-reduce: matchmaking from peer records, one flat vector, the same bytes for everyone."""

from collab_core.averaging.averager import ExactAverager, RoundOutcome, RoundRequest
from collab_core.averaging.codecs import CODECS, Codec
from collab_core.averaging.faults import FailAt

__all__ = ["CODECS", "Codec", "ExactAverager", "FailAt", "RoundOutcome", "RoundRequest"]
