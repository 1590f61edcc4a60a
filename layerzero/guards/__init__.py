"""Guards: refusals and warnings about programs that sharding would change in silence.

Each is an `Extension` of the model, or stands on a public hook of torch; the engine imports none.
"""

from __future__ import annotations

from torch import nn

from layerzero.guards.lost_writes import FirstForward, LostWrites
from layerzero.guards.outside_uses import StrayGradients, Surroundings
from layerzero.step.root import RootState


def install(module: nn.Module, root: RootState) -> None:
    """Guard a model that has just been built. Not collective.

    Args:
        module: the outermost wrapped module.
    """
    extensions = root.extensions
    extensions.add(Surroundings(module, root.units))
    extensions.add(StrayGradients(root.units))
    first = FirstForward(extensions, root.units)
    extensions.add(LostWrites(root.context, root.units, first))
    extensions.add(first)
