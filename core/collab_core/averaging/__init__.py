"""Exact all-reduce: matchmaking from peer records, one flat vector, the same bytes for everyone."""

from collab_core.averaging.averager import ExactAverager, RoundOutcome, RoundRequest
from collab_core.averaging.codecs import CODECS, Codec
from collab_core.averaging.faults import FailAt
from collab_core.averaging.link import Bandwidth

__all__ = ["CODECS", "Bandwidth", "Codec", "ExactAverager", "FailAt", "RoundOutcome", "RoundRequest"]
