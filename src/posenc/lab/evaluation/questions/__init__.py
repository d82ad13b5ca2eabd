"""Questions on texts of any length: RULER's thirteen tasks, JSON lookup, needles in other words.

Reference: Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language
Models?", https://arxiv.org/abs/2404.06654. The tasks are built as there; texts, words and the
documents of both QA forms are posenc's or the user's, so that figures are not the paper's.
"""

from posenc.lab.evaluation.questions.making import TASKS, QuestionMaker, task_names
from posenc.lab.evaluation.questions.question import Question, QuestionTask, Unfit

__all__ = ["TASKS", "Question", "QuestionMaker", "QuestionTask", "Unfit", "task_names"]
