"""How far apart two colours are for eyes that lack a kind of cone (Machado et al. 2009), in CIELAB."""

import math

Colour = tuple[float, float, float]

EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no middle": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no short": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.95047, 1.0, 1.08883)


def distance(a: str, b: str, eye: tuple[Colour, ...]) -> float:
    """CIE76's difference of two colours, written as six hexadecimal digits, as an eye sees them."""
    return math.dist(_lab(a, eye), _lab(b, eye))


def _lab(colour: str, eye: tuple[Colour, ...]) -> Colour:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    seen = [min(1.0, max(0.0, value)) for value in _times(eye, linear)]
    x, y, z = (_root(v / w) for v, w in zip(_times(XYZ, seen), WHITE, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _times(matrix: tuple[Colour, ...], vector: list[float]) -> list[float]:
    return [sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix]


def _root(value: float) -> float:
    return math.cbrt(value) if value > 0.008856 else 7.787 * value + 16 / 116
