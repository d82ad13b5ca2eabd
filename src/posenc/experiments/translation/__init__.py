"""Translation of a parallel text of the user: a small program of its own.

``train_translator(TranslatorSettings(...))`` learns a vocabulary and a model; ``Translator.load``
reads what it has written, and ``Translator.translate`` translates lines.
"""

from posenc.experiments.translation.parallel import read_lines, read_parallel
from posenc.experiments.translation.settings import TranslatorSettings
from posenc.experiments.translation.subwords import Subwords
from posenc.experiments.translation.training import Report, train_translator
from posenc.experiments.translation.translator import Translator

__all__ = [
    "Report",
    "Subwords",
    "Translator",
    "TranslatorSettings",
    "read_lines",
    "read_parallel",
    "train_translator",
]
