"""The log as a value: what was seen of it stays as it was, whatever comes later."""

from hypothesis import given
from hypothesis import strategies as st

from kvscope.transport.tail import Tail


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=30), st.integers(1, 9))
def test_every_tail_keeps_its_elements_whoever_goes_on_from_it(extensions, max_length):
    tails, wanted = [Tail[int](max_length=max_length)], [list[int]()]
    for number, (origin, count) in enumerate(extensions):
        place = origin % len(tails)
        more = [10 * number + element for element in range(count)]
        tails.append(tails[place].followed_by(more))
        wanted.append([*wanted[place], *more][-max_length:])
    for tail, elements in zip(tails, wanted, strict=True):
        assert list(tail) == elements == tail[:]
        assert list(reversed(tail)) == elements[::-1]
        assert (len(tail), bool(tail)) == (len(elements), bool(elements))
        assert [tail[place] for place in range(-len(elements), len(elements))] == elements * 2


def test_a_list_that_grows_for_long_keeps_no_more_than_its_end():
    tail = Tail[int](max_length=100)
    for number in range(10_000):
        tail = tail.followed_by([number])
    assert list(tail) == list(range(9_900, 10_000))
    assert len(tail._all) <= 126
