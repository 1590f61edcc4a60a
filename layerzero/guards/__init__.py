"""Guards: refusals and warnings about programs that sharding would change in silence.

Each is an `Extension` of the model, or stands on a public hook of torch; the engine imports none.
"""

from __future__ import annotations

from torch import nn

from layerzero.guards.each_forward import EachForward
from layerzero.guards.first_forward import FirstForward
from layerzero.guards.outside_uses import RefusesDDP, StrayGradients
from layerzero.step.root import RootState


def install(module: nn.Module, root: RootState) -> None:
    """Guard a model that has just been built. Not collective.

    Args:
        module: the outermost wrapped module.
    """
    # Makes `DistributedDataParallel(module)` raise, also for a wrapper around the module.
    module.__dict__.setdefault("_ddp_params_and_buffers_to_ignore", RefusesDDP())
    extensions = root.extensions
    extensions.add(StrayGradients(root.units))
    first = FirstForward(extensions, root.units)
    extensions.add(EachForward(root.context, root.units, first))
    extensions.add(first)
