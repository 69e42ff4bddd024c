"""Coding tasks of our own making: functions to complete, and tests that their completions must pass.

Half of the tasks need `LIBRARY`, made-up rules that no model has seen: an answer is right only if the model reads names
and numbers from its context.
"""

from __future__ import annotations

from dataclasses import dataclass

LIBRARY = '''\
"""Rules of the harbour of Velm. Weights are in grams, prices in pence, times in minutes."""

BOARD_WEIGHT = 137
CRATE_LIMIT = 2350
BERTH_FEE = {"sloop": 415, "ketch": 760, "barge": 1290}
QUIET_HOURS = range(22 * 60 + 30, 24 * 60)


def crate_weight(boards, nails):
    """Weight of an empty crate: each board weighs BOARD_WEIGHT, each nail weighs 3."""
    return boards * BOARD_WEIGHT + nails * 3


def tariff(weight, fragile=False):
    """Price of one parcel: 12 pence a started hundred grams, 250 more if it is fragile."""
    return -(-weight // 100) * 12 + (250 if fragile else 0)


def tide(minute):
    """Depth in centimetres at a minute of the day: it rises for 373 minutes, then falls for 373."""
    phase = minute % 746
    return 180 + (phase if phase <= 373 else 746 - phase)


def call_sign(name, number):
    """Sign of a ship: the first three letters in upper case, a dash, the number with four digits."""
    return f"{name[:3].upper()}-{number:04d}"


def read_sign(sign):
    """Inverse of call_sign, as far as it can be: a pair of letters and number."""
    letters, _, digits = sign.partition("-")
    return letters, int(digits)


class Ship:
    """A ship: `kind` is a key of BERTH_FEE, `draught` its depth in centimetres, `parcels` a list of weights."""

    def __init__(self, name, kind, draught, parcels=()):
        self.name, self.kind, self.draught, self.parcels = name, kind, draught, list(parcels)

    def cargo(self):
        """Weight of all parcels."""
        return sum(self.parcels)

    def floats(self, minute):
        """True if the water is at least 30 centimetres deeper than the draught."""
        return tide(minute) >= self.draught + 30
'''


@dataclass(frozen=True)
class Task:
    """``start``: the signature and docstring to complete. ``tests``: statements that fail if the function is wrong."""

    start: str
    tests: str


def _task(signature: str, says: str, *tests: str) -> Task:
    return Task(f'def {signature}:\n    """{says}"""\n', "\n".join(f"assert {test}" for test in tests))


TASKS = (
    # These need the library.
    _task(
        "total_tariff(weights)",
        "Price of all parcels of these weights, none of them fragile.",
        "total_tariff([]) == 0",
        "total_tariff([100, 101, 1]) == 12 + 24 + 12",
    ),
    _task(
        "fragile_tariff(weights)",
        "Price of all parcels of these weights, each of them fragile.",
        "fragile_tariff([100]) == 262",
        "fragile_tariff([250, 50]) == 36 + 12 + 500",
    ),
    _task(
        "full_crate_weight(boards, nails, load)",
        "Weight of a crate with its load.",
        "full_crate_weight(2, 10, 500) == 804",
        "full_crate_weight(0, 0, 7) == 7",
    ),
    _task(
        "is_crate_too_heavy(boards, nails, load)",
        "True if crate and load together weigh more than CRATE_LIMIT.",
        "not is_crate_too_heavy(10, 0, 980)",
        "is_crate_too_heavy(10, 0, 981)",
    ),
    _task(
        "most_boards()",
        "The largest number of boards of a crate without nails and load that is within CRATE_LIMIT.",
        "most_boards() == 17",
    ),
    _task(
        "harbour_fee(ships)",
        "The sum of the berth fees of all ships.",
        "harbour_fee([]) == 0",
        "harbour_fee([Ship('a', 'sloop', 1), Ship('b', 'barge', 1)]) == 1705",
    ),
    _task(
        "kinds_by_fee()",
        "The kinds of ships in a list, the most expensive berth first.",
        "kinds_by_fee() == ['barge', 'ketch', 'sloop']",
    ),
    _task(
        "heaviest_ship(ships)",
        "The name of the ship with the heaviest cargo, or None if there are no ships.",
        "heaviest_ship([]) is None",
        "heaviest_ship([Ship('a', 'sloop', 1, [5]), Ship('b', 'sloop', 1, [3, 3])]) == 'b'",
    ),
    _task(
        "highest_tide()",
        "The depth in centimetres at high tide.",
        "highest_tide() == 553",
    ),
    _task(
        "first_afloat(ship)",
        "The first minute of the day at which the ship floats, or None if it never does.",
        "first_afloat(Ship('a', 'sloop', 160)) == 10",
        "first_afloat(Ship('a', 'sloop', 100)) == 0",
        "first_afloat(Ship('a', 'barge', 600)) is None",
    ),
    _task(
        "signs(ships)",
        "The call signs of the ships, numbered from 1 in their order.",
        "signs([Ship('Marlin', 'sloop', 1), Ship('Orca', 'ketch', 1)]) == ['MAR-0001', 'ORC-0002']",
    ),
    _task(
        "next_sign(sign)",
        "The call sign with the same letters and the next number.",
        "next_sign('MAR-0009') == 'MAR-0010'",
        "next_sign('ORC-0123') == 'ORC-0124'",
    ),
    _task(
        "is_quiet(hour, minute)",
        "True if this time of the day is in QUIET_HOURS.",
        "is_quiet(22, 30) and is_quiet(23, 59)",
        "not is_quiet(22, 29) and not is_quiet(0, 0)",
    ),
    _task(
        "cargo_price(ship)",
        "The price of all parcels of a ship, none of them fragile.",
        "cargo_price(Ship('a', 'sloop', 1, [100, 150])) == 36",
        "cargo_price(Ship('a', 'sloop', 1)) == 0",
    ),
    _task(
        "afloat(ships, minute)",
        "The names of the ships that float at this minute, in alphabetical order.",
        "afloat([Ship('z', 'sloop', 150), Ship('b', 'sloop', 1), Ship('c', 'sloop', 151)], 0) == ['b', 'z']",
    ),
    _task(
        "lightest_parcel(ships)",
        "The weight of the lightest parcel on any of the ships, or None if there is no parcel.",
        "lightest_parcel([Ship('a', 'sloop', 1, [5, 9]), Ship('b', 'sloop', 1, [7])]) == 5",
        "lightest_parcel([Ship('a', 'sloop', 1)]) is None",
    ),
    # These do not.
    _task(
        "count_vowels(text)",
        "How many letters of the text are vowels (a, e, i, o, u), in upper or lower case.",
        "count_vowels('Banana') == 3",
        "count_vowels('XYZ') == 0",
        "count_vowels('AEIOU') == 5",
    ),
    _task(
        "running_sum(numbers)",
        "A list whose items are the sums of the numbers up to and including the one in their place.",
        "running_sum([1, 2, 3]) == [1, 3, 6]",
        "running_sum([]) == []",
    ),
    _task(
        "second_largest(numbers)",
        "The second largest of the different numbers, or None if there are fewer than two.",
        "second_largest([3, 1, 3, 2]) == 2",
        "second_largest([4, 4]) is None",
    ),
    _task(
        "compress(text)",
        "Run-length encode: 'aaab' becomes 'a3b1'.",
        "compress('aaab') == 'a3b1'",
        "compress('') == ''",
        "compress('abba') == 'a1b2a1'",
    ),
    _task(
        "rotate(items, steps)",
        "A list with the items moved to the right by steps places; those at the end come to the start.",
        "rotate([1, 2, 3, 4], 1) == [4, 1, 2, 3]",
        "rotate([1, 2, 3], 5) == [2, 3, 1]",
        "rotate([], 2) == []",
    ),
    _task(
        "is_balanced(text)",
        "True if the brackets (), [] and {} in the text are balanced.",
        "is_balanced('a(b[c]{d})')",
        "not is_balanced('(]')",
        "not is_balanced('((')",
        "is_balanced('')",
    ),
    _task(
        "to_roman(number)",
        "The Roman numeral of a number from 1 to 3999.",
        "to_roman(1994) == 'MCMXCIV'",
        "to_roman(3) == 'III'",
        "to_roman(40) == 'XL'",
    ),
    _task(
        "primes_below(limit)",
        "All primes below the limit, in a list.",
        "primes_below(12) == [2, 3, 5, 7, 11]",
        "primes_below(2) == []",
    ),
    _task(
        "merge(a, b)",
        "Merge two sorted lists into one sorted list.",
        "merge([1, 4], [2, 3, 5]) == [1, 2, 3, 4, 5]",
        "merge([], [1]) == [1]",
    ),
    _task(
        "group_by_length(words)",
        "A dict from a length to the list of words of that length, in their order.",
        "group_by_length(['a', 'bb', 'c']) == {1: ['a', 'c'], 2: ['bb']}",
    ),
    _task(
        "flatten(nested)",
        "All items of lists in lists, however deep, as one list.",
        "flatten([1, [2, [3, []]], 4]) == [1, 2, 3, 4]",
    ),
    _task(
        "most_common(words)",
        "The most frequent word; of several, the one that is first in the alphabet. There is at least one word.",
        "most_common(['b', 'a', 'b', 'a', 'c']) == 'a'",
        "most_common(['z']) == 'z'",
    ),
    _task(
        "transpose(rows)",
        "The transpose of a matrix that is a list of rows of equal length, as a list of lists.",
        "transpose([[1, 2], [3, 4], [5, 6]]) == [[1, 3, 5], [2, 4, 6]]",
        "transpose([]) == []",
    ),
    _task(
        "binary_search(numbers, wanted)",
        "The index of wanted in a sorted list, or -1.",
        "binary_search([1, 3, 5, 7], 5) == 2",
        "binary_search([1, 3], 2) == -1",
        "binary_search([], 1) == -1",
    ),
    _task(
        "caesar(text, shift)",
        "Shift each lower-case letter by shift places, from z on to a; leave all else as it is.",
        "caesar('xyz!', 3) == 'abc!'",
        "caesar('Abc', 1) == 'Acd'",
    ),
    _task(
        "digits_sum(number)",
        "The sum of the decimal digits of a whole number, which may be negative.",
        "digits_sum(-123) == 6",
        "digits_sum(0) == 0",
    ),
)
