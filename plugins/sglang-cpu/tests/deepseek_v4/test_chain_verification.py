# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest
import torch
from sglang_cpu.deepseek_v4 import speculation


def verify(
    candidates: list[list[int]], target: list[list[int]]
) -> tuple[list[int], list[list[int]], list[int]]:
    requests, width = len(candidates), len(candidates[0])
    predicts, index, right = speculation.verify_tree_greedy_func(
        predicts=torch.zeros(requests * width, dtype=torch.int32),
        accept_index=torch.full((requests, width), -1, dtype=torch.int32),
        accept_token_num=torch.empty(requests, dtype=torch.int32),
        candidates=torch.tensor(candidates),
        target_predict=torch.tensor(target),
    )
    return predicts.tolist(), index.tolist(), right.tolist()


def test_a_chain_is_accepted_up_to_the_first_wrong_token() -> None:
    predicts, index, right = verify([[7, 1, 2, 3], [7, 1, 2, 3]], [[1, 2, 9, 4], [5, 2, 3, 4]])
    assert right == [2, 0]
    assert index == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert predicts == [1, 2, 9, 0, 5, 0, 0, 0]


def test_a_right_chain_is_accepted_with_the_targets_next_token() -> None:
    predicts, index, right = verify([[7, 1, 2]], [[1, 2, 8]])
    assert (predicts, index, right) == ([1, 2, 8], [[0, 1, 2]], [2])


def test_the_bonus_token_is_the_last_accepted_one() -> None:
    bonus = torch.empty(2, dtype=torch.int32)
    speculation.fill_bonus_tokens_func(
        torch.tensor([[5, 6, 0], [8, 0, 0]]), torch.tensor([2, 1]), bonus, 3, 2
    )
    assert bonus.tolist() == [6, 8]


def test_a_chain_links_each_row_to_the_next() -> None:
    positions = torch.empty(6, dtype=torch.int64)
    index, following, sibling = (torch.empty(2, 3, dtype=torch.int64) for _ in range(3))
    unused = torch.empty(0)
    speculation.build_tree_kernel_efficient_func(
        unused, unused, torch.tensor([10, 20]), unused, positions, index, following, sibling, 1, 2, 3, 0
    )
    assert positions.tolist() == [10, 11, 12, 20, 21, 22]
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert following.tolist() == [[1, 2, -1]] * 2
    assert sibling.unique().tolist() == [-1]


def test_a_tree_of_candidates_is_refused() -> None:
    unused = torch.empty(0)
    with pytest.raises(NotImplementedError, match="2 per step"):
        speculation.build_tree_kernel_efficient_func(
            unused, unused, unused, unused, unused, unused, unused, unused, 2, 2, 5, 0
        )


def test_slots_are_recorded_and_found_again() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    requests, start = torch.tensor([2, 0]), torch.tensor([1, 4])
    speculation.assign_req_to_token_pool_func(requests, table, start, start + 3, torch.arange(11, 17), 2)
    assert speculation.assign_extend_cache_locs_func(requests, table, start, draft_token_num=3).tolist() == [
        *range(11, 17)
    ]
    assert speculation.get_last_loc(table, requests, torch.tensor([4, 0])).tolist() == [13, -1]
    drafted = torch.empty(4, dtype=torch.int64)
    speculation.assign_draft_cache_locs_contiguous_func(requests, table, start, drafted, 1, 2)
    assert drafted.tolist() == [11, 12, 14, 15]
