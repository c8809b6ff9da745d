# SPDX-License-Identifier: MIT
"""What EAGLE does between the draft and the target model, for chains: one candidate per step, as V4 requires.

Functions have the signatures of SGLang 0.5.23. A batch's verification rows are numbered
`request * width + column`, where `width` is the length of a chain, the last accepted token included.
"""

from __future__ import annotations

import torch


def get_last_loc(
    req_to_token: torch.Tensor, req_pool_indices_tensor: torch.Tensor, prefix_lens_tensor: torch.Tensor
) -> torch.Tensor:
    """Return the slot of each request's last cached token, -1 where there is none."""
    last = req_to_token[req_pool_indices_tensor, prefix_lens_tensor - 1]
    return torch.where(prefix_lens_tensor > 0, last, -1)


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Record the slots in `out_cache_loc` as those of each request's positions from start to end."""
    del batch_size
    first = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[request, start:end] = out_cache_loc[first : first + end - start].to(req_to_token.dtype)
        first += end - start


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    **_: object,
) -> None:
    """Write each request's next `topk * num_cols` slots into `out_cache_loc`."""
    columns = seq_lens.unsqueeze(1) + torch.arange(topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices.unsqueeze(1), columns].flatten())


def assign_extend_cache_locs_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    **_: object,
) -> torch.Tensor:
    """Return each request's `draft_token_num` slots from `start_offset` on, one request after the other."""
    columns = start_offset.unsqueeze(1) + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.unsqueeze(1), columns].flatten().long()


def build_tree_kernel_efficient_func(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Describe the chains to verify. The mask stays as it is: attention here follows positions.

    Raises:
        NotImplementedError: The candidates form a tree.
    """
    del parent_list, top_scores_index, tree_mask, tree_mask_mode
    if topk != 1 or num_verify_tokens != spec_steps + 1:
        message = f"only chains can be verified, not {num_verify_tokens} tokens of {topk} per step"
        raise NotImplementedError(message)
    column = torch.arange(num_verify_tokens)
    positions.copy_((seq_lens.unsqueeze(1) + column).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token.copy_(torch.where(column < spec_steps, column + 1, -1).expand_as(retrieve_next_token))
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy_func(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept each chain up to the first token that the target model would not have chosen.

    Returns:
        `predicts`, the target's choices at accepted rows; `accept_index`, the accepted rows, -1 behind them;
        `accept_token_num`, how many drafted tokens were right. All are also changed in place.
    """
    width = candidates.shape[1]
    right = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(1).sum(1)
    column = torch.arange(width)
    accepted = column <= right.unsqueeze(1)
    rows = torch.arange(candidates.numel()).view_as(candidates)
    predicts[rows[accepted]] = target_predict[accepted].to(predicts.dtype)
    accept_index.copy_(torch.where(accepted, rows, -1))
    accept_token_num.copy_(right)
    return predicts, accept_index, accept_token_num


def fill_bonus_tokens_func(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write each request's last accepted token into `bonus_tokens`."""
    rows = torch.arange(batch_size) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[rows])


def clear_unaccepted_c128_draft_states(*_: object, **__: object) -> None:
    """Do nothing: compression here reads a ring up to the first token of a batch, never a rejected one."""
