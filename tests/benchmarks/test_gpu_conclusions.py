"""What `make gpu` concludes from its measurements."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu.conclusions import (
    GIB,
    Fed,
    Kernels,
    Measured,
    Variant,
    fastest,
    feeding_sentences,
    fitting_batch,
    group_of,
    llama_sentences,
    traffic,
)

PRICES = {"head": 1.408, "worker": 0.816}
EAGER = Variant(sharded=True, recompute=False, compiled=False)


def config(params: float, width: int, layers: int, hidden: int, sequence: int) -> Any:
    return SimpleNamespace(
        width=width, layers=layers, hidden=hidden, sequence=sequence, vocabulary=32_000,
        parameters=lambda: params, flops_per_token=lambda: 6 * params,
    )  # fmt: skip


ONE = config(1.1e9, 2048, 16, 8192, 2048)
SEVEN = config(6.74e9, 4096, 32, 11_008, 4096)


def fed(workers: int, images: int) -> Fed:
    return Fed(workers, images // 16, images, seconds=10.0, waited=9.0, busy=1.0)


def verdict(four: int, twelve: int) -> str:
    found = [fed(0, 160), fed(4, four), fed(12, twelve)]
    return list(feeding_sentences(found, 4, PRICES, limit=1000.0))[-1]


def test_workers_pay_from_the_ratio_of_the_prices_on() -> None:
    assert verdict(1600, 3200).endswith(
        "2.00 times as fast for 1.58 times the price of an hour: +27 % steps for a dollar."
        " The claim of +23 % is confirmed."
    )
    assert "+14 % steps for a dollar" in verdict(1600, 2880)
    assert verdict(1600, 2880).endswith("is refuted: it pays, but less.")
    assert "-18 % steps for a dollar" in verdict(1600, 2080)
    assert verdict(1600, 2080).endswith("of +23 % is refuted.")


def test_feeding_says_how_many_workers_the_trainer_could_take() -> None:
    reached, needed, _ = feeding_sentences([fed(4, 800), fed(12, 2400)], 4, PRICES, 1000.0)
    assert reached == "12 workers reach 24.0 % of what the trainer can take (1,000 images/s)."
    assert needed == "At this speed of a worker the trainer could take some 50 workers."
    assert fed(4, 800).speed == 80 and fed(4, 800).idle == 90


def test_without_prices_there_is_no_verdict() -> None:
    found = [fed(4, 800), fed(12, 9900)]
    assert len(list(feeding_sentences(found, 4, {}, limit=1000.0))) == 1


def test_the_fastest_variant_has_to_learn_as_well_as_the_job() -> None:
    assert fastest([(1.0, 98.9), (0.5, 98.0), (0.1, 90.0)]) == 1
    assert fastest([(1.0, 98.9)]) == 0


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_nhwc", "convolutions"),
        ("void at::native::max_pool_backward_nhwc<float>", "pooling"),
        ("nvjet_tst_128x64_64x8_2x1_v_bz_TNT", "matrix products"),
        ("multi_tensor_apply_kernel<FusedSgdMathFunctor>", "optimizer"),
        ("vectorized_elementwise_kernel<4, tanh_backward>", "elementwise"),
        ("triton_poi_fused_max_pool2d_tanh_3", "compiled"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("reduce_kernel<512, 1, ArgMaxOps>", "reductions"),
        ("cunn_SoftMaxForward", "loss"),
        ("vectorized_gather_kernel", "reading images"),
        ("something_new", "others"),
    ],
)
def test_kernels_are_grouped_by_their_names(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_kernels_are_described_by_their_shares() -> None:
    found = Kernels(60, 200e-6, {"pooling": 50e-6, "convolutions": 150e-6}, [("conv", 2, 150e-6)])
    assert found.describe() == "60 kernels a step: convolutions 75 %, pooling 25 %"
    assert found.to_json()["longest"] == [{"name": "conv", "a_step": 2, "us": 150.0}]


def test_an_epoch_moves_activations_four_times_and_weights_eight_times() -> None:
    assert traffic(images=10, steps=2, activations=100, weights=1000) == 4000 + 16_000


def test_a_size_fits_with_its_state_and_at_least_one_sequence() -> None:
    h200, h100, l4 = 139 * GIB, 78 * GIB, 22 * GIB
    assert fitting_batch(ONE, False, h200) == 16
    assert fitting_batch(ONE, False, h100) == 8
    assert fitting_batch(ONE, False, l4) == 0 and fitting_batch(ONE, True, l4) >= 1
    assert fitting_batch(SEVEN, True, h200) >= 4 and fitting_batch(SEVEN, True, h100) == 0


def measured(variant: Variant, speed: float, gib: float, batch: int = 8) -> Measured:
    return Measured("1b", variant, batch, speed, 1.0, gib * GIB, 20.0, 10.0)


def test_llama_compares_variants_that_differ_in_one_thing_and_in_no_batch() -> None:
    compiled, recompute = EAGER._replace(compiled=True), EAGER._replace(recompute=True)
    done = [
        measured(EAGER, 50_000, 40),
        measured(compiled, 70_000, 36),
        measured(recompute, 40_000, 20),
        measured(EAGER._replace(sharded=False), 50_000, 60, batch=4),
    ]
    assert llama_sentences(done, {"1b": ONE}, 989e12) == [
        "Compiled blocks are 1.40 times as fast, with 4.0 GiB less (1b, FSDP2).",
        "Recomputation is 0.80 times as fast, with 20.0 GiB less (1b, FSDP2).",
        "Best: 46.7 % MFU (1b, FSDP2, compiled); the goal of 45 % is met.",
    ]


def test_without_a_peak_there_is_no_mfu() -> None:
    (sentence,) = llama_sentences([measured(EAGER, 5.0, 1)], {"1b": ONE}, 0.0)
    assert sentence == "Without a peak for this device there is no MFU."
