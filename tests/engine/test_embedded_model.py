"""The model that ships inside the package: intact, small, loadable the usual way, and really trained."""

import hashlib
import json
import math
import re
from importlib.resources import files
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL_DIR = Path(str(files("kvscope.engine"))) / "models" / "tiny-shakespeare"
# Written for this test in the style of the plays: neither the training nor the held-out part contains it.
UNSEEN_SPEECH = """KING HENRY:
Good morrow, cousin. What news from the north?
I hear the duke hath left his house to-night,
And we must speak with him before the day.

MESSENGER:
My lord, he comes; I saw him at the gate.
"""


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


def loss_of(model, ids) -> float:
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def test_every_file_matches_its_checksum():
    sums = dict(reversed(line.split()) for line in (MODEL_DIR / "SHA256SUMS").read_text().splitlines())
    names = {path.name for path in MODEL_DIR.iterdir()} - {"SHA256SUMS"}
    assert names == set(sums)
    for name, digest in sums.items():
        assert hashlib.sha256((MODEL_DIR / name).read_bytes()).hexdigest() == digest, name


def test_the_directory_stays_under_four_megabytes():
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 4_000_000


def test_the_shape_exercises_grouped_query_attention(model):
    config = model.config
    assert type(model) is transformers.LlamaForCausalLM
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.head_dim == 32
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize("text", [UNSEEN_SPEECH, "naïve café \N{SNOWMAN} \t tabs\r\n", ""])
def test_any_text_survives_the_tokenizer(tokenizer, model, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(id_ < model.config.vocab_size for id_ in ids)


def test_tokenizer_and_model_agree_on_the_end_of_text(tokenizer, model):
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id]


def test_the_card_states_the_loss_that_the_log_ends_with():
    rows = [json.loads(line) for line in (MODEL_DIR / "training_log.jsonl").read_text().splitlines()]
    *curve, shipped = rows
    card = (MODEL_DIR / "MODEL_CARD.md").read_text()
    (stated,) = re.findall(r"^\| 512 tokens \| ([\d.]+) \|", card, re.MULTILINE)
    assert float(stated) == shipped["held_out_loss"]
    # Rounding to half precision costs next to nothing, so the shipped loss is the last of the curve.
    assert shipped["held_out_loss"] == pytest.approx(curve[-1]["held_out_loss"], abs=0.005)


def test_it_predicts_unseen_verse_far_better_than_chance(tokenizer, model):
    ids = tokenizer(UNSEEN_SPEECH, return_tensors="pt")["input_ids"]
    uniform_loss = math.log(model.config.vocab_size)
    assert loss_of(model, ids) < 0.6 * uniform_loss
    untrained = transformers.LlamaForCausalLM(model.config).eval()
    assert loss_of(untrained, ids) > 0.95 * uniform_loss


def test_word_order_matters_to_it(tokenizer, model):
    ids = tokenizer(UNSEEN_SPEECH, return_tensors="pt")["input_ids"]
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    assert loss_of(model, ids) < loss_of(model, shuffled) - 2


def test_it_does_not_stop_by_itself(tokenizer, model):
    ids = tokenizer("ROMEO:", return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, pad_token_id=0)
    assert output.shape[1] == ids.shape[1] + 64
    with torch.no_grad():
        chances = model(output).logits.softmax(-1)[..., model.config.eos_token_id]
    assert chances.max() < 1e-3
