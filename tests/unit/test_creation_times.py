"""When a node was created, by its number."""

from layerzero.optional.creation_times import CreationTimes


def test_a_node_is_of_the_latest_call_that_began_before_it() -> None:
    times = CreationTimes()
    for number, time in ((5, 1), (5, 2), (9, 4)):
        times.note(number, time)
    assert [times.before(number) for number in (4, 5, 8, 9, 20)] == [None, 2, 2, 4, 4]


def test_another_thread_numbers_its_nodes_by_itself() -> None:
    times = CreationTimes()
    times.note(9, 1)
    times.note(3, 2)
    assert (times.before(2), times.before(9)) == (None, 2)
