"""Work shared between processes, without starting any; tests of training start real ones."""

import torch

from shortrun.processes import Processes, flushed_denormals


class OneOfTwo(Processes):
    """One of two processes that never meet: what it gathers are the parts of both, worked out one after the other."""

    num_processes = 2

    def __init__(self, index, parts):
        super().__init__()
        self.process_index, self.parts = index, parts

    def gather_objects(self, values):
        self.parts.extend(values)
        return self.parts


def test_shares_are_whole_and_do_not_overlap():
    rows = torch.arange(7)
    shares = [OneOfTwo(index, []).own(rows) for index in (0, 1)]
    assert torch.equal(torch.cat(shares), rows)
    named = [OneOfTwo(index, []).own(list("abcde")) for index in (0, 1)]
    assert [name for share in named for name in share] == list("abcde")
    assert torch.equal(Processes().own(rows), rows)


def test_chunks_give_the_same_whoever_works_on_them():
    def work(rows, rng):
        return [torch.arange(rows.start, rows.stop), torch.rand(rows.stop - rows.start, generator=rng)]

    expected = Processes().in_chunks(11, work, torch.Generator().manual_seed(0), chunk=3)
    assert torch.equal(expected[0], torch.arange(11))
    parts = []
    OneOfTwo(0, parts).in_chunks(11, work, torch.Generator().manual_seed(0), chunk=3)
    found = OneOfTwo(1, parts).in_chunks(11, work, torch.Generator().manual_seed(0), chunk=3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_tables_remember_the_rows_of_a_batch():
    table = torch.zeros(5, 2)
    Processes().remember(table, torch.tensor([3, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True))
    assert table.tolist() == [[0, 0], [3, 4], [0, 0], [1, 2], [0, 0]]


def test_denormals_count_as_zero_inside_the_outermost_block_alone():
    tiny = torch.full((8,), 1e-30)

    def product():
        return float((tiny * 1e-10).sum())

    assert product() > 0
    with flushed_denormals():
        with flushed_denormals():
            assert product() == 0
        assert product() == 0
    assert product() > 0
