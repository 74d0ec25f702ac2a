"""The table of forms in which texts are posted: those of `/v1`, Hugging Face's, and those of text-embeddings-inference (TEI)."""

from serve.http.forms import hugging_face, tei
from serve.http.forms.form import Form, own_form
from serve.tasks import SERVED_TASKS

FORMS: tuple[Form, ...] = (*map(own_form, SERVED_TASKS), *hugging_face.FORMS, *tei.FORMS)
