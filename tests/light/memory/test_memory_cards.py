"""Cards and `--gpus`: every usual spelling is read, and a slip is a sentence."""

import pytest

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import CARDS, CONTEXT_GIB, find_card, parse_gpus, with_network


def test_usual_spellings_are_read(subtests):
    for text, count, name in (
        ("4xA40-48GB", 4, "A40-48GB"),
        ("8xA100-80GB", 8, "A100-80GB"),
        ("2xA100-40", 2, "A100-40GB"),
        ("6x4090", 6, "RTX4090-24GB"),
        ("6 x RTX 4090", 6, "RTX4090-24GB"),
        ("1xNVIDIA GeForce RTX 3090", 1, "RTX3090-24GB"),
        ("8*h200", 8, "H200-141GB"),
        ("L40S", 1, "L40S-48GB"),
        ("8xNVIDIA A100-SXM4-80GB", 8, "A100-80GB"),
        ("8xMI300X", 8, "MI300X-192GB"),
        ("8xAMD Instinct MI300X", 8, "MI300X-192GB"),
        ("8x910B", 8, "Ascend910B-64GB"),
        ("8xHuawei Ascend 910B", 8, "Ascend910B-64GB"),
        ("2x5090", 2, "RTX5090-32GB"),
        ("8xB200", 8, "B200-180GB"),
        ("2xTesla T4", 2, "T4-16GB"),
        ("8xTesla V100-SXM2-32GB", 8, "V100-32GB"),
        ("3060", 1, "RTX3060-12GB"),
        ("2x3080-10", 2, "RTX3080-10GB"),
        ("NVIDIA GeForce RTX 4060 Ti 16GB", 1, "RTX4060Ti-16GB"),
        ("4070", 1, "RTX4070-12GB"),
        ("4xA4000", 4, "A4000-16GB"),
    ):
        with subtests.test(text):
            hardware = parse_gpus(text)
            assert (hardware.num_gpus, hardware.card.name) == (count, name)


def test_several_machines_are_read_and_a_network_without_them_or_a_rate_is_a_sentence():
    hardware = parse_gpus("2x8xH100-80GB")
    assert (hardware.num_machines, hardware.gpus_per_machine, hardware.num_gpus) == (2, 8, 16)
    assert str(hardware) == "2x8xH100-80GB" and parse_gpus(str(hardware)) == hardware
    assert hardware.gb_s == 50.0 < parse_gpus("8xH100-80GB").gb_s
    assert parse_gpus("2x8x4090").gb_s == parse_gpus("8x4090").gb_s  # a slow link is not made faster by the network
    for gpus, rate in (("8xH100-80GB", 100.0), ("2x8xH100-80GB", 0.0)):
        with pytest.raises(ConfigError, match="between several machines"):
            with_network(parse_gpus(gpus), rate)


def test_there_are_32_cards_with_names_of_their_own():
    assert len({card.name for card in CARDS}) == len(CARDS) == 32


# As developer.nvidia.com/cuda-gpus lists them; of AMD's and Huawei's what torch says.
CAPABILITIES = {
    "V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "A800": (8, 0), "A10": (8, 6), "A40": (8, 6), "A4000": (8, 6),
    "A5000": (8, 6), "A6000": (8, 6), "RTX3060": (8, 6), "RTX3080": (8, 6), "RTX3090": (8, 6), "L4": (8, 9),
    "L40S": (8, 9), "RTX6000Ada": (8, 9), "RTX4060Ti": (8, 9), "RTX4070": (8, 9), "RTX4090": (8, 9), "H100": (9, 0),
    "H20": (9, 0), "H200": (9, 0), "B200": (10, 0), "RTX5090": (12, 0), "RTXPRO6000": (12, 0), "MI300X": (9, 4),
    "Ascend910B": (8, 0),
}  # fmt: skip


def test_every_card_has_the_capability_of_its_maker_and_bf16_with_it():
    assert {card.name.split("-")[0]: card.capability for card in CARDS} == CAPABILITIES
    assert {card.name for card in CARDS if not card.has_bf16} == {"T4-16GB", "V100-16GB", "V100-32GB"}


def test_a_card_that_is_not_in_the_table_says_what_is_assumed_of_it_and_others_nothing():
    assert not any(card.assumed for card in CARDS)
    assert parse_gpus("1xA100-80GB", gpu_memory_gib=20).card.assumed == ""
    assert parse_gpus("2xfoo", gpu_memory_gib=64).card.assumed == (
        "foo is not in the table of cards. Assumed: 600 GB/s, 100 TFLOPS, PCIe 4 without peer access, compute "
        "capability 8.0, which has bf16."
    )


def test_every_card_is_found_and_has_a_little_less_than_its_name_ends_in(subtests):
    for card in CARDS:
        printed = float(card.name.rpartition("-")[2].removesuffix("GB"))
        with subtests.test(card.name):
            assert find_card(card.name) is card
            assert 0.91 * printed < card.total_gib <= printed


def test_a_slip_is_a_sentence_with_the_way_out(subtests):
    for text, gib, words in (
        ("4xA41-48GB", None, "A40-48GB"),
        ("4xA100", None, "A100-40GB, A100-80GB"),
        ("0xA100-80GB", None, "no GPU"),
        ("8", None, "--gpus 8 has no card. Write its name after the number, such as 8xA100-80GB"),
        ("4xfoo", None, "--gpu_memory_gib"),
        ("4xA40-80GB", None, "not in the table"),
        ("1xfoo", 1, "CUDA context"),
    ):
        with subtests.test(text), pytest.raises(ConfigError, match=words):
            parse_gpus(text, gib)


def test_given_memory_overrides_the_table_and_lets_an_unknown_card_in():
    assert parse_gpus("2xfoo", gpu_memory_gib=64).card.usable_gib == 64 - CONTEXT_GIB
    slice_of = parse_gpus("1xA100-80GB", gpu_memory_gib=20).card
    assert (slice_of.total_gib, slice_of.bandwidth_gb_s) == (20, find_card("A100-80GB").bandwidth_gb_s)
