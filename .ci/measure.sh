#!/usr/bin/env bash
# What README, the picture and the report of a run say of one model, measured in one run on one GPU. For developers.
#
#     .ci/measure.sh MODEL ANSWERS.jsonl HELDOUT.jsonl PROMPTS.jsonl TASKS OUT
#
# MODEL is a chat model, ANSWERS its own (`twellctl write`), HELDOUT answers that no fit sees, PROMPTS rows of "prompt"
# and "kind" that no fit saw, TASKS a file or folder of tasks. Exact answers are drafted by a draft head, and once more,
# as the control, by the 4 bits. OUT/run is the folder of a run, with report.html. A step that fails is noted in
# OUT/steps.txt with its seconds, and the next one follows; repeat the command to make up for it.
set -uo pipefail
[ $# = 6 ] || { sed -n '2,9s/^# \?//p' "$0" >&2; exit 2; }
model=$1 answers=$2 heldout=$3 prompts=$4 tasks=$5 out=$6
here=$(dirname "$(realpath "$0")")
export PYTHONPATH=$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3} device=${DEVICE:-cuda} new_tokens=${NEW_TOKENS:-128}
twellctl=("$python" -m twellctl)
mkdir -p "$out/log"
: >"$out/steps.txt"

# step NAME RESULT COMMAND..: runs the command unless its result is there; without a RESULT always
step() {
  local name=$1 result=$2 began=$SECONDS rc=0
  shift 2
  [ -e "$result" ] && return
  "$@" >"$out/log/$name.txt" 2>&1 || rc=$?
  echo "$name: $((SECONDS - began)) s, exit $rc" | tee -a "$out/steps.txt"
}

# exact NAME DRAFT: times exact answers, into OUT/NAME.json
exact() {
  step "$1" "$out/$1.json" "${twellctl[@]}" bench exact "$2" --original "$model" --prompts "$prompts" --limit 1000 \
    --new-tokens "$new_tokens" --json "$out/$1.json" --device "$device"
}

four=$out/four head=$out/head
step four "$four" "${twellctl[@]}" convert "$model" "$four" --data "$answers" --bits 4 --keep-activation \
  --tokens "${TOKENS:-300000}"
step head "$head" "${twellctl[@]}" draft "$model" "$head" --data "$answers"
exact exact "$head"
exact exact_four "$four"
step picture "$out/picture.json" "$python" "$here/picture.py" record "$model" "$head" "$prompts" "$out/picture.json" \
  --tokens "$new_tokens" --device "$device" --commit "${COMMIT:-$(git -C "$here" rev-parse --short HEAD)}"
step known "$out/known.json" "$python" "$here/exact_answers.py" known "$model" "$prompts" "$out/known.json" \
  --new-tokens "$new_tokens" --device "$device"
step check "" "$python" "$here/exact_answers.py" check "$model" "$head" "$prompts" "$out/known.json" \
  --device "$device"
cat >"$out/run.yaml" <<END
model: $model
out: $out/run
convert: {data: $answers, bits: 4${FIT:+, $FIT}}
eval: {data: $heldout, tasks: $tasks, run-code: true}
profile: {data: $heldout}
export: {}
END
step run "$out/run/exported" "${twellctl[@]}" run "$out/run.yaml"
step four_eval "$out/four.json" "${twellctl[@]}" eval "$four" --reference "$model" --tasks "$tasks" --run-code \
  --json "$out/four.json"
step decode "$out/decode.json" "${twellctl[@]}" bench decode "$out/run/exported" --data "$heldout" --batch 1 \
  --device "$device" --json "$out/decode.json"
mkdir -p "$out"/run/{four,head}
cp "$out"/{exact,exact_four,four,decode}.json "$out/run/" 2>/dev/null
for draft in four head; do
  cp "$out/$draft"/*.json "$out/run/$draft/" 2>/dev/null
done
step report "" "${twellctl[@]}" report "$out/run"
! grep -q 'exit [1-9]' "$out/steps.txt"
