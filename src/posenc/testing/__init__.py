"""The laws that every encoding is held to, for encodings of your own as well.

from posenc.testing import Subject, certify
certify(Subject.of_entry("my method", my_entry))
"""

from posenc.testing.identities import IDENTITIES
from posenc.testing.laws import LAWS, certify
from posenc.testing.subject import PARTIAL, LawBroken, Subject

__all__ = ["IDENTITIES", "LAWS", "PARTIAL", "LawBroken", "Subject", "certify"]
