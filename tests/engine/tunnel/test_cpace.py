"""CPace against the vectors of draft-irtf-cfrg-cpace-21, appendix B.1."""

from __future__ import annotations

import pytest

from engine.tunnel.cpace import CpaceError, calculate_generator, confirmation, multiply, session_key

CODE, CHANNEL = b"Password", b"\x0bA_initiator\x0bB_responder"
SESSION = bytes.fromhex("7e4b4791d6a8ef019b936c79fb7f2c57")
FIRST = bytes.fromhex("21b4f4bd9e64ed355c3eb676a28ebedaf6d8f17bdc365995b319097153044080")
SECOND = bytes.fromhex("848b0779ff415f0af4ea14df9dd1d3c29ac41d836c7808896c4eba19c51ac40a")
SCALAR = bytes.fromhex("af46e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449aff")


def test_generator_shares_and_key_are_those_of_the_draft() -> None:
    generator = calculate_generator(CODE, CHANNEL, SESSION)
    assert generator.hex() == "d04bf6d41f6a289632a2e929fa29bebd51092512a7829fdde7d314b62f05a73f"
    first, second = multiply(FIRST, generator), multiply(SECOND, generator)
    assert first.hex() == "1d13c89278cdadd826f6d8d7f887701430f8380ddc17611cdd6dc989ce0c9f32"
    assert second.hex() == "248cccf6d5cdc3646f0ad593f9e6cef4e69d4945f8372e623512ecea32185623"
    shared = multiply(FIRST, second)
    assert shared == multiply(SECOND, first)
    assert shared.hex() == "5b067effbdc0b2a0e1d907b21ebb25cfedb96a852179a847c37e43ee71322c6b"
    key = session_key(SESSION, shared, (first, b"ADa"), (second, b"ADb"))
    assert key.hex() == (
        "6e19b875f7a561d6b3ca3dbb9ef42ac55de3e717881018204b8922b4d5e53bb2"
        "aa82c300bea7b65d2b671da71922ddf6472301b79bc270adfa8bf413285f2263"
    )


@pytest.mark.parametrize(
    "point",
    [
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    ],
)
def test_points_that_would_give_a_key_that_all_know_are_refused(point: str) -> None:
    with pytest.raises(CpaceError):
        multiply(SCALAR, bytes.fromhex(point))


def test_a_share_of_another_length_is_refused() -> None:
    with pytest.raises(CpaceError):
        multiply(SCALAR, b"short")


def test_another_code_channel_or_session_is_another_point() -> None:
    points = {
        calculate_generator(CODE, CHANNEL, SESSION),
        calculate_generator(b"Passwore", CHANNEL, SESSION),
        calculate_generator(CODE, CHANNEL + b"2", SESSION),
        calculate_generator(CODE, CHANNEL, SESSION[::-1]),
        # What belongs to the code is no part of the channel.
        calculate_generator(CODE + CHANNEL, b"", SESSION),
    }
    assert len(points) == 5


def test_each_side_proves_in_its_own_words() -> None:
    assert confirmation(b"key", b"client") != confirmation(b"key", b"server")
    assert confirmation(b"key", b"client") != confirmation(b"other", b"client")
