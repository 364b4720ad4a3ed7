"""Corpora of text as tasks, and the tokenizers that encode them."""

from jaxaudit.text.corpus import BUILT_IN as BUILT_IN
from jaxaudit.text.corpus import Corpus as Corpus
from jaxaudit.text.corpus import Text as Text
from jaxaudit.text.corpus import load as load
from jaxaudit.text.tokenizers import TOKENIZERS as TOKENIZERS
