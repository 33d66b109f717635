"""PCI ids of any width and case, and the virtual devices of one card."""

from __future__ import annotations

import pytest

from engine.base.pci import PciId, PciName, parse_pci_id, parse_pci_name


@pytest.mark.parametrize("text", ["0000:c1:00.0", "00000000:C1:00.0", "c1:00.0", "0000:C1:00", " 0000:c1:00.0 "])
def test_widths_and_case_do_not_matter(text: str) -> None:
    assert parse_pci_id(text) == PciId(0, 0xC1, 0)


@pytest.mark.parametrize("text", ["", "GPU-5a2b", "0000:c1", "0000:g1:00.0", "1:2"])
def test_other_words_are_no_pci_id(text: str) -> None:
    assert parse_pci_id(text) is None


def test_virtual_devices_of_a_card_are_told_apart() -> None:
    assert parse_pci_name("0000:c1:00.0-v1") == PciName(PciId(0, 0xC1, 0), 1)
    assert parse_pci_name("0000:c1:00.0") == PciName(PciId(0, 0xC1, 0))
    assert parse_pci_id("0000:c1:00.0-v1") == PciId(0, 0xC1, 0)
