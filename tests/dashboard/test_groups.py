"""The far zoom: counting again where blocks were touched gives what counting everything gives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.groups import Groups
from kvscope.dashboard.pool_frame import PoolCopy, build_pool
from kvscope.events.columns import Column


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_groups_counted_where_blocks_were_touched_are_those_counted_whole(data):
    """Pictures that were left out, earlier ones and other pools in between."""
    columns, copied, memory, pictures = [Column.zeros(70), Column.zeros(70)], PoolCopy(), Groups(), []
    group, in_view = data.draw(st.sampled_from([2, 3]), "group"), slice(6, data.draw(st.integers(66, 68), "end"))
    by = data.draw(st.sampled_from([ColourBy.OWNER, ColourBy.STATE, ColourBy.REFS]), "by")
    places = st.sampled_from([0, 5, 6, 30, 65, 66, 67, 68, 69])  # in view, around it, and in its last group
    writes = st.lists(st.tuples(st.booleans(), places, st.sampled_from([0, 1, 2, 4])), min_size=1, max_size=2)
    for _ in range(data.draw(st.integers(2, 8), "pictures")):
        for is_written, place, value in data.draw(writes, "writes"):
            columns[is_written][place], columns[is_written].touched[place] = value, 1
        if not data.draw(st.integers(0, 5), "another pool?"):
            columns = [Column(column[::-1]) for column in columns]
        copied.update(*columns)
        pool = build_pool(4, copied.refs, copied.written, (), totals=copied.totals)
        pictures.append(pool._replace(changes=copied.changes))
        for shown in data.draw(st.sampled_from([[], [-1], [0, -1]]), "shown"):
            group = 5 - group if not data.draw(st.integers(0, 5), "another zoom?") else group
            ours, whole = (groups.look(pictures[shown], in_view, group, by) for groups in (memory, Groups()))
            assert [column.tolist() for column in ours] == [column.tolist() for column in whole]


def test_the_last_shorter_group_is_counted_again_beside_another():
    columns, copied, memory = (Column.zeros(29), Column.zeros(29)), PoolCopy(), Groups()
    for places in ([], [0, 28], [28], [26, 28]):
        for place in places:
            columns[0][place], columns[0].touched[place] = columns[0][place] + 1, 1
        copied.update(*columns)
        pool = build_pool(4, copied.refs, copied.written, (), totals=copied.totals)._replace(changes=copied.changes)
        for found, whole in zip(
            *(g.look(pool, slice(0, 29), 3, ColourBy.OWNER) for g in (memory, Groups())), strict=True
        ):
            assert found.tolist() == whole.tolist()
