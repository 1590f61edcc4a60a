"""Guards: refusals and warnings about programs that sharding would change in silence.

Each is an `Extension` of the model, or stands on a public hook of torch; the engine imports none.
"""

from __future__ import annotations

from layerzero.guards.each_forward import EachForward
from layerzero.guards.first_forward import FirstForward
from layerzero.guards.outside_uses import StrayGradients
from layerzero.step.root import RootState


def install(root: RootState) -> None:
    """Guard a model that has just been built. Not collective."""
    extensions = root.extensions
    extensions.add(StrayGradients(root.units))
    first = FirstForward(extensions, root.units)
    extensions.add(EachForward(root.context, root.units, first))
    extensions.add(first)
