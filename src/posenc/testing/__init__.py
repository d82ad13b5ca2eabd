"""Laws that every encoding satisfies, also for third-party encodings.

For a method of another package::

    from posenc.testing import Subject, certify

    certify(Subject.of_entry("my method", my_entry))
"""

from posenc.testing.identities import IDENTITIES
from posenc.testing.laws import LAWS, certify
from posenc.testing.subject import PARTIAL, LawBroken, Subject

__all__ = ["IDENTITIES", "LAWS", "PARTIAL", "LawBroken", "Subject", "certify"]
