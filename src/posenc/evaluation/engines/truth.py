"""Rules of transformers against layers that were run."""

from __future__ import annotations

import math

from posenc.evaluation.doctor.facts import Reading
from posenc.evaluation.doctor.rotation import Rotation as Read
from posenc.evaluation.engines.comparison import Served
from posenc.evaluation.engines.rotation import Rotation


def unlike_rules(served: Served, reading: Reading) -> tuple[int, ...]:
    """Layers that rotate by none of the rotations of a config, as their code ran.

    Args:
        served: the config in transformers.
        reading: of the layers; nothing is known of layers that were not run, of rotations that
            change with the length, and of those without frequencies.
    """
    if reading.by != "run" or not served.rotations:
        return ()
    return tuple(
        number
        for layers in reading.layers
        for number in layers.numbers
        if isinstance(layers.attention.rotation, Read)
        if not any(_alike(layers.attention.rotation, own) for own in served.rotations.values())
    )


def _alike(read: Read, stated: Rotation) -> bool:
    if read.frequencies is None or read.varies is not False:
        return True
    moving = [theta for theta in stated.frequencies if theta]
    if len(moving) != len(read.frequencies):
        return False
    same = all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(read.frequencies, moving, strict=True)
    )
    return same and (read.gain is None or math.isclose(read.gain, stated.gain, rel_tol=1e-3))
