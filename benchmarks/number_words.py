"""A parallel text that can be made anywhere: arithmetic in words, English to German.

German says units before tens (24 is vierundzwanzig) and writes a number as one word, so that what
is written is not in the order of what is read.
"""

from __future__ import annotations

import random
from pathlib import Path

__all__ = ["english", "german", "write_numbers"]

PAIRS = 20_000

SIGNS = (("plus", "plus"), ("minus", "minus"), ("times", "mal"), ("divided by", "geteilt durch"))

ENGLISH = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen"""
ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
GERMAN = """null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn
fünfzehn sechzehn siebzehn achtzehn neunzehn"""
GERMAN_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"


def write_numbers(path: Path) -> None:
    """Write ``PAIRS`` different lines, each a term of one to four numbers, a tab, the same."""
    draw = random.Random(0)
    lines = set()
    while len(lines) < PAIRS:
        numbers = [draw.randrange(10 ** draw.randint(1, 6)) for _ in range(draw.randint(1, 4))]
        source, target = [english(numbers[0])], [german(numbers[0])]
        for number in numbers[1:]:
            sign = draw.choice(SIGNS)
            source += [sign[0], english(number)]
            target += [sign[1], german(number)]
        lines.add(f"{' '.join(source)}\t{' '.join(target)}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(sorted(lines)), encoding="utf-8")


def english(number: int) -> str:
    """A number below a million in words."""
    if number < 20:
        return ENGLISH.split()[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return ENGLISH_TENS.split()[tens - 2] + (f"-{english(ones)}" if ones else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    many, rest = divmod(number, size)
    return f"{english(many)} {name}" + (f" {english(rest)}" if rest else "")


def german(number: int) -> str:
    """The same in German, as one word."""
    if number < 20:
        return GERMAN.split()[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return (f"{_before(ones)}und" if ones else "") + GERMAN_TENS.split()[tens - 2]
    size, name = (100, "hundert") if number < 1000 else (1000, "tausend")
    many, rest = divmod(number, size)
    return _before(many) + name + (german(rest) if rest else "")


def _before(number: int) -> str:
    """A number as it is said before another: eins loses its s."""
    said = german(number)
    return said.removesuffix("s") if number % 100 == 1 else said
