"""Generated pictures: a shape somewhere in noise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KINDS = ("circle", "square", "triangle", "stripes")

Numbers = npt.NDArray[np.float64]


def draw(
    random: np.random.Generator, count: int, *, size: int, noise: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """`count` pictures of `size` × `size` values around 0, and which of KINDS each one is."""
    labels = (random.random(count) * len(KINDS)).astype(np.int64)
    centre_x, centre_y = (random.random((2, count, 1, 1)) - 0.5) * 0.5
    radius = 0.4 + 0.4 * random.random((count, 1, 1))
    axis = np.linspace(-1, 1, size)
    x, y = axis[None, None, :] - centre_x, axis[None, :, None] - centre_y
    shapes = np.stack(
        [
            x * x + y * y < radius * radius,
            np.maximum(abs(x), abs(y)) < 0.9 * radius,
            (abs(x) < (y + radius) / 2) & (y < radius),
            np.sin(6 * (x + y) / radius) > 0,
        ]
    )
    pictures = shapes[labels, np.arange(count)] - 0.5 + noise * (2 * random.random((count, size, size)) - 1)
    return pictures.astype(np.float32), labels


def as_text(picture: npt.NDArray[np.float32]) -> list[str]:
    """A picture in characters; every second row, since characters are higher than wide."""
    levels = np.clip((picture[::2] + 0.75) / 1.5 * 5, 0, 4).astype(int)
    return ["".join(" .+#@"[level] for level in row) for row in levels]
