# SPDX-License-Identifier: MIT
from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ucm.integration.sglang.namespace import CacheNamespace, RankShard, ServedModel, block_keys

TP2 = RankShard(tp_rank=1, tp_size=2)


def namespace(
    *,
    name: str = "Qwen3",
    shard: RankShard = TP2,
    model_replicated: bool = False,
    pool: str = "kv",
    primary: bool = True,
    replicated: bool | None = None,
    dtype: str = "bfloat16",
    layout: str = "page_first",
    page_tokens: int = 64,
    segment_bytes: tuple[int, ...] = (4096, 4096),
) -> CacheNamespace:
    return CacheNamespace(
        model=ServedModel(name=name, shard=shard, replicated=model_replicated),
        pool=pool,
        primary=primary,
        replicated=model_replicated if replicated is None else replicated,
        dtype=dtype,
        layout=layout,
        page_tokens=page_tokens,
        segment_bytes=segment_bytes,
        component_bytes=(sum(segment_bytes),) if pool == "mamba" else segment_bytes,
    )


def key_text(namespace: CacheNamespace, page_hash: str = "abc") -> str:
    return page_hash + namespace.key_suffix


# Golden: caches written by earlier releases keep their names.
@pytest.mark.parametrize(
    ("namespace", "text"),
    [
        (namespace(), "abc_Qwen3_1_2"),
        (namespace(model_replicated=True), "abc_Qwen3"),
        (namespace(pool="swa", primary=False), "abc_Qwen3_1_2__v2_tp_1_2__pool_swa__component_0"),
        (
            namespace(pool="indexer", primary=False, model_replicated=True),
            "abc_Qwen3__v2_tp_0_2__pool_indexer__component_0",
        ),
        (
            namespace(pool="mamba", primary=False, model_replicated=True, replicated=False),
            "abc_Qwen3__v2_tp_1_2__pool_mamba__component_0",
        ),
    ],
)
def test_the_key_text_of_the_plain_case_is_golden(namespace: CacheNamespace, text: str) -> None:
    assert key_text(namespace) == text


def test_a_block_key_is_the_md5_of_its_text() -> None:
    assert block_keys(["abc"], "_Qwen3_1_2") == [hashlib.md5(b"abc_Qwen3_1_2").digest()]  # noqa: S324 -- A name.


# sglang #17193: keys are opaque.
@pytest.mark.parametrize("page_hash", ["a" * 64, "f" * 16, "鍵é\N{GRINNING FACE}", "x" * 2000, ""])
def test_any_text_is_a_page_hash(page_hash: str) -> None:
    (key,) = block_keys([page_hash], "_m_0_1")

    assert len(key) == 16


@pytest.mark.parametrize(
    ("namespace", "directory"),
    [
        (namespace(), ""),
        (namespace(pool="swa", primary=False), "sglang_v2/swa_4096x2"),
        (namespace(pool="mamba", primary=False, segment_bytes=(900, 90, 9)), "sglang_v2/mamba_999x1"),
    ],
)
def test_a_sidecar_has_a_directory_of_its_own(namespace: CacheNamespace, directory: str) -> None:
    assert namespace.directory == directory


def test_models_that_differ_in_a_slash_do_not_collide() -> None:
    names = ["org/a-b", "org-a/b", "org-a-b", "org/a/b"]

    assert len({key_text(namespace(name=name)) for name in names}) == 4


# sglang #15175, #37149, #26670
@pytest.mark.parametrize(
    ("shard", "suffix"),
    [
        (replace(TP2, pp_rank=1, pp_size=2), "_pp1_2"),
        (replace(TP2, cp_rank=3, cp_size=4), "_cp3_4"),
        (RankShard(tp_rank=1, tp_size=2, dcp_rank=1, dcp_size=2), "_dcp1_2"),
    ],
)
def test_ranks_that_split_layers_or_tokens_are_in_every_key(shard: RankShard, suffix: str) -> None:
    assert suffix in key_text(namespace(shard=shard))
    assert suffix in key_text(namespace(shard=shard, model_replicated=True))
    assert suffix in key_text(namespace(shard=shard, pool="swa", primary=False))


def test_a_replicated_pool_has_one_key_whichever_rank_asks() -> None:
    shards = [RankShard(tp_rank=rank, tp_size=8) for rank in range(8)]
    texts = {key_text(namespace(shard=s, model_replicated=True, pool="c4", primary=False)) for s in shards}

    assert len(texts) == 1


def test_ranks_of_one_dcp_shard_share_their_key() -> None:
    shards = [RankShard(tp_rank=rank, tp_size=4, dcp_rank=rank % 2, dcp_size=2) for rank in range(4)]
    texts = [key_text(namespace(shard=s, model_replicated=True, pool="c4", primary=False)) for s in shards]

    assert texts[0] == texts[2]
    assert texts[1] == texts[3]
    assert texts[0] != texts[1]


def test_a_rank_outside_its_group_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"pp_rank must be in \[0, 2\), got 2"):
        RankShard(pp_rank=2, pp_size=2)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp8_e4m3"},
        {"layout": "page_first_direct"},
        {"page_tokens": 128},
        {"segment_bytes": (8192,)},
        {"pool": "swa"},
        {"name": "Qwen3-Next"},
    ],
)
def test_the_identity_changes_with_the_meaning_of_the_bytes(change: dict[str, object]) -> None:
    assert namespace(**change).identity_digest != namespace().identity_digest  # type: ignore[arg-type]  # One field.


def test_the_identity_is_the_same_on_every_rank() -> None:
    other = RankShard(tp_rank=0, tp_size=2)

    assert namespace(shard=other).identity_digest == namespace().identity_digest


SIZES = st.integers(1, 3)


@st.composite
def shards(draw: st.DrawFn) -> RankShard:
    sizes = {group: draw(SIZES) for group in ("pp", "cp")}
    dcp_size = draw(SIZES)
    tp_size = dcp_size * draw(SIZES)
    tp_rank = draw(st.integers(0, tp_size - 1))
    return RankShard(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=draw(st.integers(0, sizes["pp"] - 1)),
        pp_size=sizes["pp"],
        cp_rank=draw(st.integers(0, sizes["cp"] - 1)),
        cp_size=sizes["cp"],
        dcp_rank=tp_rank % dcp_size,
        dcp_size=dcp_size,
    )


def holds(shard: RankShard, *, replicated: bool) -> RankShard:
    """The rank whose bytes this rank holds."""
    return shard.of_writer() if replicated else shard


MODELS = st.sampled_from(["m", "m_0_2", "m_0", "a/b", "a-b", "m__pool_swa", "m_pp0_2"])
POOLS = st.sampled_from(["kv", "swa", "mamba", "deepseek_v4_c4", "deepseek_v4_c4_state"])


@given(first=shards(), second=shards(), model_replicated=st.booleans(), replicated=st.booleans(), pool=POOLS)
def test_two_ranks_share_a_sidecar_key_exactly_when_they_hold_the_same_bytes(
    first: RankShard, second: RankShard, model_replicated: bool, replicated: bool, pool: str
) -> None:
    replicated = replicated and model_replicated
    texts = [
        key_text(
            namespace(
                shard=shard,
                model_replicated=model_replicated,
                replicated=replicated,
                pool=pool,
                primary=False,
            )
        )
        for shard in (first, second)
    ]
    same_bytes = holds(first, replicated=replicated) == holds(second, replicated=replicated)
    assert (texts[0] == texts[1]) == same_bytes


@given(first=shards(), second=shards(), model_replicated=st.booleans())
def test_two_ranks_of_one_server_share_a_primary_key_exactly_when_they_hold_the_same_bytes(
    first: RankShard, second: RankShard, model_replicated: bool
) -> None:
    second = replace(
        first,
        tp_rank=second.tp_rank % first.tp_size,
        pp_rank=second.pp_rank % first.pp_size,
        cp_rank=second.cp_rank % first.cp_size,
        dcp_rank=second.tp_rank % first.tp_size % first.dcp_size,
    )
    texts = [key_text(namespace(shard=shard, model_replicated=model_replicated)) for shard in (first, second)]
    same = holds(first, replicated=model_replicated) == holds(second, replicated=model_replicated)
    assert (texts[0] == texts[1]) == same


HASHES = st.text(alphabet="0123456789abcdef", min_size=1, max_size=8)


@given(
    hashes=st.tuples(HASHES, HASHES),
    names=st.tuples(MODELS, MODELS),
    ranks=st.tuples(shards(), shards()),
    replicated=st.booleans(),
    pools=st.tuples(POOLS, POOLS),
    primary=st.booleans(),
)
def test_different_pages_differ_in_key_or_identity(
    hashes: tuple[str, str],
    names: tuple[str, str],
    ranks: tuple[RankShard, RankShard],
    replicated: bool,
    pools: tuple[str, str],
    primary: bool,
) -> None:
    assume(hashes[0] != hashes[1] or names[0] != names[1] or pools[0] != pools[1])
    places = [
        namespace(name=name, shard=shard, model_replicated=replicated, pool=pool, primary=primary)
        for name, shard, pool in zip(names, ranks, pools, strict=True)
    ]
    blocks = [
        (key_text(place, page), place.identity_digest) for place, page in zip(places, hashes, strict=True)
    ]
    assert blocks[0] != blocks[1]
