"""Positions of tokens as data.

Shape letters used throughout posenc:

====== =========================================
``B``  batch rows (1 where all rows agree)
``H``  query heads
``G``  key/value heads (H is a multiple of G)
``L``  tokens
``Q``  queries, ``K`` keys
``D``  width of a head, ``C`` width of the model
``A``  axes of a position (1 text, 2 images)
``N``  buckets of a relative method
====== =========================================
"""

from posenc.layout.layout import Layout

__all__ = ["Layout"]
