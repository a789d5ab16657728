"""Cards and `--gpus`: every usual spelling is read, and a slip is a sentence."""

import pytest

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import CARDS, CONTEXT_GIB, find_card, parse_gpus, with_network


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
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
    ],
)
def test_usual_spellings_are_read(text, count, name):
    hardware = parse_gpus(text)
    assert (hardware.num_gpus, hardware.card.name) == (count, name)


def test_several_machines_are_read():
    hardware = parse_gpus("2x8xH100-80GB")
    assert (hardware.num_machines, hardware.gpus_per_machine, hardware.num_gpus) == (2, 8, 16)
    assert str(hardware) == "2x8xH100-80GB" and parse_gpus(str(hardware)) == hardware
    assert hardware.gb_s == 50.0 < parse_gpus("8xH100-80GB").gb_s


def test_slow_links_are_not_made_faster_by_the_network():
    assert parse_gpus("2x8x4090").gb_s == parse_gpus("8x4090").gb_s


@pytest.mark.parametrize(("gpus", "rate"), [("8xH100-80GB", 100.0), ("2x8xH100-80GB", 0.0)])
def test_a_network_without_machines_or_rate_is_a_sentence(gpus, rate):
    with pytest.raises(ConfigError, match="between several machines"):
        with_network(parse_gpus(gpus), rate)


def test_there_are_22_cards_with_names_of_their_own():
    assert len({card.name for card in CARDS}) == len(CARDS) == 22


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_is_found_by_its_name(card):
    assert find_card(card.name) is card


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_the_name_ends_in_the_memory_that_torch_sees_a_little_less_of(card):
    printed = float(card.name.rpartition("-")[2].removesuffix("GB"))
    assert 0.91 * printed < card.total_gib <= printed


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_computes_in_bf16(card):
    assert card.capability >= (8, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4xA41-48GB", "A40-48GB"),
        ("4xA100", "A100-40GB, A100-80GB"),
        ("0xA100-80GB", "no GPU"),
        ("4xfoo", "--gpu_memory_gib"),
        ("4xA40-80GB", "not in the table"),
    ],
)
def test_a_slip_is_a_sentence_with_the_way_out(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_gpus(text)


def test_a_card_of_which_only_the_memory_is_known_is_let_in():
    assert parse_gpus("2xfoo", gpu_memory_gib=64).card.usable_gib == 64 - CONTEXT_GIB


def test_given_memory_overrides_the_table_and_keeps_the_rates():
    slice_of = parse_gpus("1xA100-80GB", gpu_memory_gib=20).card
    assert (slice_of.total_gib, slice_of.bandwidth_gb_s) == (20, find_card("A100-80GB").bandwidth_gb_s)


def test_less_memory_than_the_context_takes_is_refused():
    with pytest.raises(ConfigError, match="CUDA context"):
        parse_gpus("1xfoo", gpu_memory_gib=1)
