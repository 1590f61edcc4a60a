"""Steps and prefetch lists from names alone."""

from __future__ import annotations

from layerzero.plan.order import Place, backward_lists, forward_lists, order_steps


def place(fqn: str, pattern: int = 0, member: bool = False, by: str | None = None) -> Place:
    return Place(fqn=fqn, pattern=pattern, is_member=member, gathered_with=by or fqn)


def steps(*places: Place) -> list[tuple[str, ...]]:
    return [(step.head, *step.others) for step in order_steps(places)]


def test_layers_follow_each_other() -> None:
    places = [place(f"layers.{index}", member=True) for index in range(12)]
    assert steps(*places) == [(f"layers.{index}",) for index in range(12)]


def test_units_inside_a_layer_are_of_its_step() -> None:
    assert steps(
        place("embed", 0),
        place("layers.0", 1, member=True),
        place("layers.0.attn", 2, member=True),
        place("layers.0.experts.0", 3, member=True),
        place("layers.0.experts.1", 3, member=True),
        place("layers.1", 1, member=True),
        place("layers.1.attn", 2, member=True),
        place("head", 4),
    ) == [
        ("embed",),
        ("layers.0", "layers.0.attn", "layers.0.experts.0", "layers.0.experts.1"),
        ("layers.1", "layers.1.attn"),
        ("head",),
    ]


def test_a_unit_around_a_series_is_a_step_of_its_own() -> None:
    around = place("encoder", 0)
    layers = [place(f"encoder.layers.{index}", 1, member=True) for index in range(2)]
    assert steps(around, *layers) == [("encoder",), ("encoder.layers.0",), ("encoder.layers.1",)]
    assert order_steps([around, *layers])[0].is_around_steps
    assert not order_steps([around, *layers])[1].is_around_steps


def test_one_pattern_for_everything_makes_each_unit_a_step() -> None:
    places = [place(fqn, 0, member=True) for fqn in ("model", "model.a", "model.a.b", "model.c")]
    assert steps(*places) == [("model",), ("model.a",), ("model.a.b",), ("model.c",)]


def test_a_unit_is_of_the_step_of_its_hook_module() -> None:
    assert steps(
        place("banks.0", 1, member=True, by="layers.0.moe"),
        place("banks.1", 1, member=True, by="layers.1.moe"),
        place("layers.0", 0, member=True),
        place("layers.1", 0, member=True),
    ) == [("layers.0", "banks.0"), ("layers.1", "banks.1")]


def test_the_order_of_patterns_decides_between_parts_of_one_module() -> None:
    assert steps(
        place("decoder.0", 1, member=True),
        place("decoder.1", 1, member=True),
        place("encoder.0", 0, member=True),
        place("encoder.1", 0, member=True),
    ) == [("encoder.0",), ("encoder.1",), ("decoder.0",), ("decoder.1",)]
    # But not over the nesting: each layer runs its parts before the next one does.
    assert steps(
        place("layers.0.mlp", 1, member=True),
        place("layers.0.attn", 0, member=True),
        place("layers.1.mlp", 1, member=True),
        place("layers.1.attn", 0, member=True),
    ) == [("layers.0.attn",), ("layers.0.mlp",), ("layers.1.attn",), ("layers.1.mlp",)]


def test_lists_hold_the_rest_of_the_step_and_the_next_steps() -> None:
    found = order_steps(
        [
            place("layers.0", 0, member=True),
            place("layers.0.a", 1, member=True),
            place("layers.0.b", 2, member=True),
            place("layers.1", 0, member=True),
            place("layers.2", 0, member=True),
        ]
    )
    assert forward_lists(found, 1) == {
        "": ("layers.0", "layers.0.a", "layers.0.b"),
        "layers.0": ("layers.0.a", "layers.0.b", "layers.1"),
        "layers.1": ("layers.2",),
    }
    assert backward_lists(found, 2, when_done=False) == {
        "": ("layers.2", "layers.1"),
        "layers.2": ("layers.1", "layers.0", "layers.0.b", "layers.0.a"),
        "layers.1": ("layers.0", "layers.0.b", "layers.0.a"),
        "layers.0": ("layers.0.b", "layers.0.a"),
    }
    assert backward_lists(found, 1, when_done=True) == {
        "layers.2": ("layers.1",),
        "layers.1": ("layers.0", "layers.0.b", "layers.0.a"),
    }
    assert forward_lists(found, 0) == {} == backward_lists(found, 0, when_done=False)


def test_in_backward_a_unit_around_others_comes_before_them() -> None:
    blocks = [place(f"visual.blocks.{index}", 1, member=True) for index in range(2)]
    layers = [place(f"language.layers.{index}", 3, member=True) for index in range(2)]
    found = order_steps(
        [
            place("visual", 0),
            *blocks,
            place("language", 2),
            place("language.embed", 2),
            *layers,
            place("head", 4),
        ]
    )
    assert backward_lists(found, 1, when_done=False) == {
        "": ("head",),
        "head": ("language",),
        "language": ("language.layers.1",),
        "language.layers.1": ("language.layers.0",),
        "language.layers.0": ("language.embed",),
        "language.embed": ("visual",),
        "visual": ("visual.blocks.1",),
        "visual.blocks.1": ("visual.blocks.0",),
    }
    # When the head is done, what is around the layers is needed at once, and its last layer next.
    assert backward_lists(found, 1, when_done=True) == {
        "head": ("language", "language.layers.1"),
        "language.layers.1": ("language.layers.0",),
        "language.layers.0": ("language.embed",),
        "language.embed": ("visual", "visual.blocks.1"),
        "visual.blocks.1": ("visual.blocks.0",),
    }
    inside = [place("layer", 0), place("layer.a", 1), place("layer.a.q", 2), place("layer.b", 3)]
    assert order_steps(inside)[0] == ("layer", ("layer.a", "layer.a.q", "layer.b"), False)
    lists = backward_lists(order_steps(inside), 1, when_done=False)
    assert lists == {"": ("layer", "layer.b", "layer.a", "layer.a.q"),
                     "layer": ("layer.b", "layer.a", "layer.a.q")}  # fmt: skip
