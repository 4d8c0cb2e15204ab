#!/usr/bin/env bash
# Keeps the history of the nightly on a separate branch, which shares no commit with the code:
#   scripts/nightly_history.sh get MATRIX FOLDER    copies MATRIX/ of the branch to FOLDER; nothing without a branch
#   scripts/nightly_history.sh put MATRIX FOLDER    copies FOLDER to MATRIX/ and pushes; lines are only ever added
set -euo pipefail

usage() {
  sed -n '2,4p' "$0" >&2
  exit 2
}
[[ $# -eq 3 && ($1 == get || $1 == put) && $2 =~ ^[a-z0-9_]+$ ]] || usage
what=$1 matrix=$2 folder=$3
branch=${NIGHTLY_BRANCH:-nightly-history}
lines=$matrix/history.jsonl

fetched() {
  git ls-remote --exit-code --heads origin "$branch" >/dev/null || return 1
  git fetch --quiet --depth=1 origin "$branch"
}

if [[ $what == get ]]; then
  mkdir -p "$folder"
  if fetched && [[ -n $(git ls-tree FETCH_HEAD -- "$lines") ]]; then
    git archive FETCH_HEAD -- "$matrix" | tar --extract --directory="$folder" --strip-components=1
    echo "$(wc -l <"$folder/history.jsonl") lines of history from $branch"
  else
    echo "no history of $matrix on $branch yet"
  fi
  exit
fi

[[ -f $folder/history.jsonl ]] || {
  echo "error: $folder does not contain history.jsonl" >&2
  exit 2
}
work=$(mktemp -d)
trap 'git worktree remove --force "$work/tree" 2>/dev/null || true; rm -rf "$work"' EXIT
export GIT_AUTHOR_NAME=nightly GIT_AUTHOR_EMAIL=nightly@localhost GIT_COMMITTER_NAME=nightly GIT_COMMITTER_EMAIL=nightly@localhost
if fetched; then
  start=$(git rev-parse FETCH_HEAD)
else
  start=$(git commit-tree "$(git hash-object -t tree /dev/null)" -m "The history of the nightly begins")
fi
git worktree add --quiet --detach "$work/tree" "$start"
old=$work/tree/$lines
if [[ -f $old ]] && ! cmp --quiet --bytes="$(stat --format=%s "$old")" "$old" "$folder/history.jsonl"; then
  echo "error: $folder/history.jsonl does not continue the one on $branch; nothing was written" >&2
  exit 1
fi
mkdir -p "$work/tree/$matrix"
cp "$folder/history.jsonl" "$work/tree/$matrix/"
if [[ -d $folder/settings ]]; then cp -r "$folder/settings" "$work/tree/$matrix/"; fi
git -C "$work/tree" add --all
if git -C "$work/tree" diff --cached --quiet; then
  echo "nothing new to write to $branch"
  exit
fi
git -C "$work/tree" commit --quiet --message "Nightly $matrix of $(date --utc +%F)"
git -C "$work/tree" push --quiet origin "HEAD:refs/heads/$branch"
echo "$(wc -l <"$folder/history.jsonl") lines of history on $branch"
