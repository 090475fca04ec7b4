"""How float32 values travel. What a codec loses stays at home and is added the next time (error feedback)."""

from collab_core.averaging.codecs.codec import Codec, is_finite, largest
from collab_core.averaging.codecs.fp16 import Fp16Codec
from collab_core.averaging.codecs.int4 import Int4Codec
from collab_core.averaging.codecs.int8 import Int8Codec
from collab_core.averaging.codecs.none import NoCodec
from collab_core.averaging.codecs.topk import TopKCodec

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (NoCodec(), Fp16Codec(), Int8Codec(), Int4Codec(), TopKCodec())
}
"""What contributions travel in, by its name in the run file."""

__all__ = ["CODECS", "Codec", "TopKCodec", "is_finite", "largest"]
