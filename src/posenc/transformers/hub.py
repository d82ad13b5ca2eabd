"""Models of the Hugging Face hub by their names, in the cache of huggingface_hub."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from posenc.errors import CheckpointError
from posenc.storage import as_path

NAME = re.compile(r"(?P<repo>\w[\w.-]{0,95}/\w[\w.-]{0,95})(@(?P<revision>\S{1,100}))?")

CONFIGS = ("config.json", "tokenizer_config.json", "sentence_bert_config.json")
"""Files that a model is diagnosed by."""

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")

SIDECARS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.model", "chat_template*", "generation_config.json", "preprocessor_config.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
)
"""Sidecar files of config and weights, which may depend on the longest text alone."""

MODULES = "[0-9]*_*/*"
"""Files of the further modules of sentence-transformers, such as pooling, a folder each."""

REASONS = {
    "ImportError": (
        "no such folder, and huggingface_hub is not installed",
        "Install it: pip install 'posenc[transformers]'.",
    ),
    "LocalEntryNotFoundError": (
        "no such folder, no connection to the hub, and no complete copy in its cache",
        "",
    ),
    "GatedRepoError": (
        "a model of the hub that is not open to all",
        "Accept its terms on its page, then: hf auth login",
    ),
    "RepositoryNotFoundError": (
        "no such folder, and no such model of the hub",
        "Check the name; for a private model: hf auth login",
    ),
    "RevisionNotFoundError": (
        "a model of the hub without this revision",
        "Name a branch, a tag or a commit of it.",
    ),
}
"""Meanings of errors by kind, special ones first, and remedies other than to fetch the model."""


@dataclass(frozen=True)
class HubName:
    """A model of the hub, written ``org/name`` or ``org/name@revision``.

    Args:
        repo: ``org/name``.
        revision: a branch, tag or commit; None: the default branch.
    """

    repo: str
    revision: str | None = None

    @classmethod
    def of(cls, source: Path | str) -> HubName | None:
        """The name that is meant; None for anything that exists, or can only be a folder."""
        path = Path(source)
        match = None if path.exists() else NAME.fullmatch(path.as_posix())
        return None if match is None else cls(**match.groupdict())

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def words(self) -> str:
        """The name on the command line of ``hf``, vLLM and SGLang."""
        return (
            f"{self.repo} --revision {shlex.quote(self.revision)}" if self.revision else self.repo
        )

    def folder(self, *, weights: bool) -> Path:
        """The repository's folder in the cache, updated where the hub can be reached.

        Args:
            weights: with all that the model needs to run; otherwise ``CONFIGS`` alone.

        Raises:
            CheckpointError: if the hub lacks it or does not give it, or cannot be reached and the
                cache lacks a file.
        """
        fetch = f"hf download {self.words}" + ("" if weights else f" {' '.join(CONFIGS)}")
        remedy = f"Where the hub can be reached: {fetch}"
        try:
            from huggingface_hub import snapshot_download

            folder = Path(
                snapshot_download(
                    self.repo,
                    revision=self.revision,
                    allow_patterns=[*CONFIGS, *((*WEIGHTS, *SIDECARS, MODULES) if weights else ())],
                    ignore_patterns=["[!0-9]*/*", "*/*/*"],
                )
            )
        except Exception as error:  # of the name, the connection or the disk
            kinds = [kind.__name__ for kind in type(error).__mro__]
            explained = next((reason for kind, reason in REASONS.items() if kind in kinds), None)
            unexplained = f"{kinds[0]}: {str(error).strip().partition(chr(10))[0]}", remedy
            got, advice = explained or unexplained
            raise self._missing(got, advice or remedy) from error
        for needed in (CONFIGS[0], *(WEIGHTS[:1] if weights else ())):
            if not any(folder.glob(needed)):
                raise self._missing(f"no {needed} in {folder}", f"{remedy}. Pickle is never read.")
        return folder

    def _missing(self, got: str, remedy: str) -> CheckpointError:
        expected = "a folder, or a model of the hub"
        return CheckpointError(str(self), expected=expected, got=got, remedy=remedy)


def model_folder(source: Path | str, *, weights: bool) -> Path:
    """The folder of a model: itself, or that of the cache for a name on the hub.

    Args:
        source: a folder, which comes first, or a name.
        weights: see ``HubName.folder``.

    Raises:
        CheckpointError: as ``HubName.folder``.
    """
    name = HubName.of(source)
    return name.folder(weights=weights) if name else as_path(source)
