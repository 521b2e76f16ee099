"""The command line of make-tiny and convert."""

import subprocess
import sys

import pytest

from glmv.cli import main


@pytest.fixture
def glmv(monkeypatch, capsys):
    """Run `glmv ...` in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["glmv", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_there_and_back(glmv, tmp_path, file_bytes):
    assert glmv("make-tiny", tmp_path / "hf", "--seed", 5)[0] == 0
    assert glmv("convert", "hf-to-dcp", "--hf-dir", tmp_path / "hf", "--save-dir", tmp_path / "dcp")[0] == 0
    assert glmv("convert", "dcp-to-hf", "--dcp-dir", tmp_path / "dcp", "--save-dir", tmp_path / "back")[0] == 0
    assert file_bytes(tmp_path / "back") == file_bytes(tmp_path / "hf")


def test_the_summary_has_tensors_size_and_notices(glmv, tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM4V_DCP_3D", "1")
    _, out, _ = glmv("convert", "hf-to-dcp", "--hf-dir", tiny_dir, "--save-dir", tmp_path / "dcp")
    assert "142 tensors  0.001 GB" in out
    assert "notice: GLM4V_DCP_3D has no effect" in out


def test_a_user_s_mistake_is_one_message_and_exit_code_2(glmv, tmp_path):
    code, out, err = glmv("convert", "hf-to-dcp", "--hf-dir", tmp_path, "--save-dir", tmp_path / "dcp")
    assert (code, out) == (2, "")
    assert err.strip().startswith(f"{tmp_path}: has neither")
    assert "Traceback" not in err


def test_help_does_not_import_torch():
    script = "import sys, glmv.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
