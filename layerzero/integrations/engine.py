"""The interface of the engine for adapters to other frameworks, beside the public one.

Adapters use `layerzero`, `layerzero.config`, `layerzero.checkpoint`, `checkpoint.adapters` and the
names below, at most thirty (decision 0036); everything else is internal, which
`tests/unit/test_imports.py` enforces.
"""
# Every import is an export.
# ruff: noqa: F401
# mypy: implicit-reexport

from layerzero.build.wrap import WrapPolicy, make_chooser
from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import copy_attributes, get_info
from layerzero.notices import some, warn_once
from layerzero.optim import attach
from layerzero.parallel.split import equalize
from layerzero.parallel.totals import Totals, broadcast_buffers
from layerzero.plan.options import (
    MODULE_OPTIONS,
    ZERO3_OPTIONS,
    engine_arguments,
    load_yaml,
    near_matches,
)
from layerzero.plan.options import read_options as read_plan_options
from layerzero.plan.patterns import parse_pattern
from layerzero.plan.resolve import optional_by_name
from layerzero.plan.sharding_plan import read_patterns
from layerzero.state_dict.foreign_methods import refuse_pieces, summoned
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import get_unit
from layerzero.wrapping.fsdp_arguments import to_policy
from layerzero.wrapping.refusals import has_forward
from layerzero.wrapping.units import ordered_units
