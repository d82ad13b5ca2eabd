"""Train a translator on a parallel text of your own, and translate files with it.

    python -m examples.translation train --text pairs.tsv --out german
    python -m examples.translation train --text train.en --target train.de --encoding rope
    python -m examples.translation train --resume --out german

learns a subword vocabulary, trains an encoder–decoder until it no longer gets better on held-out
pairs, and scores others by BLEU. Ctrl-C saves; ``--resume`` goes on to the same bits.

    python -m examples.translation run german book.en --output book.de
    echo "the house" | python -m examples.translation run german
    python -m examples.translation run german test.en --reference test.de

translates line by line. ``data`` cuts pairs into batches, ``translator`` holds model and
vocabulary, ``training`` is one call of ``posenc.lab.training.fit``.
"""
