"""Translation of a parallel text of the user: a small program of its own.

``train_translator(TranslatorSettings(...))`` learns a vocabulary and a model; ``Translator.load``
reads what it has written, and ``Translator.translate`` translates lines.
"""

from posenc.lab.translation.parallel import read_lines, read_parallel
from posenc.lab.translation.settings import TranslatorSettings
from posenc.lab.translation.subwords import Subwords
from posenc.lab.translation.training import Report, train_translator
from posenc.lab.translation.translator import Translator

__all__ = [
    "Report",
    "Subwords",
    "Translator",
    "TranslatorSettings",
    "read_lines",
    "read_parallel",
    "train_translator",
]
