"""Rejected command lines: each prints one line with the problem, has its exit code, and changes nothing."""

import shlex
from collections.abc import Iterator

import pytest

from tests.cli.conftest import TOKEN, Koala, Server
from tests.identities import administrators
from tests.memory_stores import memory_stores

REJECTIONS = """
submit --flexible 20 x → --flexible is 20, but the whole grid has 8 nodes
submit --flexible x x → Invalid value for '--flexible': 'x' is not a
submit --flexible 6 --split 4,3 x → --split 4,3 sums to 7
submit --flexible 2 --min-component 3 x → --min-component is 3
submit --fixed north:1,nroth:1 x → --fixed: cluster of component 1 is nroth
submit --nonfixed 1,5 x → --nonfixed: size of component 1 is 5
submit --nonfixed 4,4,4 x → --nonfixed: the components need 12 nodes
submit --flexible 6 --nonfixed 2 x → --flexible and --nonfixed cannot be given together
submit --nonfixed 2,x x → --nonfixed is '2,x'; give numbers
submit --nonfixed 2,,1 x → --nonfixed is '2,,1'
submit --nonfixed 2 --max-components 1 x → --min-component, --max-components and --split are for flexible requests
submit --flexible 2 --split '1;1' x → --split is '1;1'
submit --fixed north x → --fixed is 'north'; give clusters and sizes
submit --fixed :2 x → --fixed is ':2'
submit --fixed north:--2 x → --fixed is 'north:--2'
submit --fixed north:² x → --fixed is 'north:²'
submit --fixed north:0_1 x → --fixed is 'north:0_1'
submit --flexible 0_1 x → Invalid value for '--flexible': '0_1' is not a valid whole number
submit --flexible 6 --ppn 0 x → --ppn is 0
submit --flexible 6 --walltime 0 x → --walltime is '0'; give more than 0 seconds
submit --flexible 6 --walltime soon x → --walltime is 'soon', not a duration
submit --flexible 6 --walltime 90 x → --walltime is '90', which may mean
submit --flexible 6 --policy-option metric x → --policy-option is 'metric'
submit --flexible 6 --coallocation no x → --coallocation is 'no'; use never, allowed, or the maximum number
submit --flexible 6 --coallocation 0 x → --coallocation is 0, not a valid number
submit --flexible 6 --coallocation=--2 x → --coallocation is '--2'
submit --flexible 6 --coallocation ² x → --coallocation is '²'
submit --flexible 6 --coallocation 1.5 x → --coallocation is '1.5'
submit --flexible 6 --claiming x x → Invalid value for '--claiming': 'x'; known: a
submit --flexible 6 --claim-threshold 2 x → --claim-threshold is 2
submit --flexible 6 --speed-ratio-min -1 x → --speed-ratio-min is -1
submit --flexible 6 --max-claiming-tries 0 x → --max-claiming-tries is 0
submit --flexible 6 --retry-on-exit 300 x → --retry-on-exit is 300
submit --flexible 6 --collect '/etc/*' x → --collect is '/etc/*', which is not below the component's folder
submit --flexible 6 --feature 'ib&gpu' x → --feature is 'ib&gpu', which no resource manager accepts as a name
submit --flexible 6 --gpus 0 x → --gpus count is 0; give at least 1
submit --flexible 6 --memory 16G x → --memory is '16G', not an amount of memory; give a number with a unit: 16GB
submit --flexible 6 --memory 64 x → --memory is '64', which has no unit; give 64GB or 64MB
submit --flexible 6 --communication 2 x → --communication is 2; give a fraction of the run time from 0 to 1
submit --flexible 6 --input :partitioned x → --input is ':partitioned'; give a logical name
submit --flexible 6 --input f:as=a:as=b x → --input f:as=a:as=b sets as twice
submit --flexible 6 --input f:whole:partitioned x → --input f:whole:partitioned sets distribution twice
submit --flexible 6 --after afterok:7 x → --after is 'afterok:7', not a dependency
submit --flexible 6 --array 5-1 x → --array has the range 5-1, which ends before
submit --flexible 6 --array 0-999999999 x → --array is 0-999999999, with 1000000000
submit --flexible 6 --array-fail stop x → --array-fail is stop, but the job is no
submit --flexible 6 --export NOT_HERE x → --export is 'NOT_HERE': 'NOT_HERE' is not set; give NAME=VALUE
submit --flexible 6 --export A=1,,B=2 x → --export is 'A=1,,B=2': a name is empty
submit --flexible 6 --export NONE,A=1 x → --export is 'NONE,A=1'; give NONE alone
submit --flexible 6 --export A=1,NONE x → --export is 'A=1,NONE'; give NONE alone
submit --flexible 6 --export ALL, x → --export is 'ALL,': a name is empty
submit --flexible 6 --export =1 x → --export is '=1': a name is empty
submit --flexible 6 --env NOT_HERE x → --env NOT_HERE: this variable is not set; give --env NAME=VALUE
submit --flexible 6 → command is empty
submit x → the request has no nodes
submit -f /nowhere.yaml → cannot read /nowhere.yaml
submit --flexible 1 --timeout 5 x → --timeout needs --wait
submit --flexible 1 -q --json x → --quiet and --json cannot be given together
submit --flexible 20 --dry-run -- x → --flexible is 20
submit --flexible 2 --dry-run → command is empty
submit --flexible 2 --dry-run --wait -- x → --wait and --dry-run
submit --fixed north:2 south:2 -- x → 'south:2' before -- is no option; write the command after --,
submit --nonfixed 2 2 -- x → '2' before -- is no option
submit --nonfixed 2 2 1 -- x -- y → '2 1' before -- is no option
submit --flexible 2 --name a b --wait -- x → 'b --wait' before -- is no option
run --fixed north:2 south:2 -- x → 'south:2' before -- is no option
shell --fixed north:2 south:2 -- x → 'south:2' before -- is no option
shell --fixed north:2 south:2 --name x -- y -- z → 'south:2' before -- is no option
shell 7 8 -- x → '8' before -- is no option
change 1 --flexible 20 → --flexible is 20
change 1 --flexible 0 → --flexible is 0
change 1 --flexible 2 --fixed north:2 → --flexible and --fixed cannot be given together
change 1 --fixed north:2 --max-components 2 → --min-component, --max-components and --split are for flexible requests
change 1 --reset walltime → --reset is 'walltime'; give one of
change 1 --reset policy --policy best-fit → --policy and --reset policy cannot be given together
change 1 --reset max-components --max-components 2 → --max-components and --reset max-components cannot be given
change 1 --policy other → there is no policy other; known: adaptive
change 7 --flexible 2 → 3: there is no job 7
queue --state runing → Invalid value for '--state': 'runing'; did you mean running?
queue --tasks 0_1 → Invalid value for '--tasks': '0_1' is not a valid whole number
queue --tasks +1 → Invalid value for '--tasks': '+1' is not a valid whole number
queue -q --json → --quiet and --json cannot be given together
queue -q -o json → --quiet and --json cannot be given together
queue -o wide --json → --output and --json cannot be given together
queue --all --user bob → --user and --all cannot be given together
queue --json --watch → --json and --watch cannot be given together
queue -o json --watch → --json and --watch cannot be given together
queue -q --watch → --quiet and --watch cannot be given together
queue --since 7 → --since is '7', which has no unit
queue --until soon → --until is 'soon', which is no time
show 9 → 3: there is no job 9
show nine → Invalid value for 'JOB...': 'nine' is not a job; give 7, or 7[3-9] for tasks of an array
show 1[] → Invalid value for 'JOB...': '1[]': the part in brackets is empty
show 1[2%3] → Invalid value for 'JOB...': '1[2%3]': give indices in the brackets
show x[2] → Invalid value for 'JOB...': 'x[2]' is not a job; give 7, or 7[3-9] for tasks of an array
show +1 → Invalid value for 'JOB...': '+1' is not a job
show ' 1' → Invalid value for 'JOB...': ' 1' is not a job
show \u0661 → Invalid value for 'JOB...': '\u0661' is not a job
show 0_1[2] → Invalid value for 'JOB...': '0_1[2]' is not a job
show 1 -f --json → --follow and --json cannot be given together
show 1 -q --json → --quiet and --json cannot be given together
queue 1 --state queued → ids of jobs and options that select or sort jobs cannot be given together
show 1 --url localhost → localhost is not a URL
show 1 --url http://127.0.0.1:1 → 5: no daemon answers at http://127.0.0.1:1
logs 9 → 3: there is no job 9
logs 9 -f → 3: there is no job 9
logs 1 --output --error → --error and --output cannot be given together
wait 9 → 3: there is no job 9
wait 1 --state queued → --state and JOB cannot be given together; drop one
explain 7 → 3: there is no job 7
cancel → koala cancel is given no job; give ids, --last, or a selection such as
cancel 1 --mine → --mine and JOB cannot be given together; drop one
cancel 1 -u bob → --user and JOB cannot be given together; drop one
cancel -u bob --mine → --user and --mine cannot be given together; drop one
cancel --last -u bob → --user and --last cannot be given together; drop one
cancel --last --name x → --name and --last cannot be given together; drop one
cancel --state over → --state is over, and koala cancel cannot change jobs in state 'over'; use claiming,
cancel --state , → --state is ,, and koala cancel cannot change jobs in state ''; use claiming,
cancel 1_3 → Invalid value for 'JOB...': '1_3' is not a job; name a task as 1[3]
cancel 1_[3-4] → Invalid value for 'JOB...': '1_[3-4]' is not a job; name a task as 1[3-4]
hold → koala hold is given no job; give ids, --last, or a selection such as
hold 1_3 → Invalid value for 'JOB...': '1_3' is not a job; name a task as 1[3]
hold 1[2] → 1[2] is a part of an array, and hold acts on whole arrays; koala hold 1
release 1[2] → 1[2] is a part of an array, and release acts on whole arrays; koala release 1
release --state queued → --state is queued, and koala release cannot change jobs in state 'queued'; use held
priority high → koala priority is given no job; give ids, --last, or a selection such as
priority high 1[2] → 1[2] is a part of an array, and priority acts on whole arrays; koala priority high 1
priority higher 1 → Invalid value for 'PRIORITY': 'higher'
clusters --json --watch → --json and --watch cannot be given together
clusters drain nroth --reason x → 3: there is no cluster nroth; did you mean north?
clusters lost nroth --yes → 3: there is no cluster nroth
local-run nroth 1 true → 3: there is no cluster nroth
advisor record --limit 0 → Invalid value for '--limit': 0 is not in the range 1<=x
network measure nroth → clusters[0] is nroth; known: north, south
network history north x → 3: there is no cluster x
network history north → Missing argument 'PEER'
token create -q --json → --quiet and --json cannot be given together
token create --role god → Invalid value for '--role': 'god'
token create --expires soon → --expires is 'soon'
token revoke → no tokens are given; give their numbers, or --all
token revoke 1 --all → no tokens are given; give their numbers, or --all
token revoke 7 → 3: there is no token 7
audit-log --since 3600 → --since is '3600', which has no unit; give 3600s, 3600m, 3600h or 3600d
audit-log --until soon → --until is 'soon', which is no time; give 7d
audit-log --until 1d --follow → --follow and --until cannot be given together; choose one of them
audit-log --action hold_jop → --action is 'hold_jop', which is not an operation; did you mean hold_job or hold_jobs?
audit-log --action xyz → --action is 'xyz', which is not an operation; give an operation, such as submit_job
audit-log --known-head 1:00 → --known-head needs --verify; add --verify
audit-log --verify --known-head=1 → --known-head is '1', which is not ID:HASH; give ID:HASH
audit-log --verify --known-head=x:00 → --known-head is 'x:00', which is not ID:HASH
audit-log --verify --known-head=0:00 → --known-head is '0:00', which is not ID:HASH
audit-log --verify --known-head=-1:00 → --known-head is '-1:00', which is not ID:HASH
workload generate --preset x → --preset is 'x', which is not a preset; known: m05, s10-vi, s10-vii
workload generate --sizes a → --sizes is 'a'
workload generate --sizes 9 --components 1 → could never run
workload generate --clusters north → --clusters is 'north'
workload generate --clusters north:0 → --clusters is 'north:0'
workload generate --swf /nowhere → cannot read /nowhere: No such file
workload generate --swf x --rate 1 → --swf defines the arrivals; leave out --rate and --utilisation
workload generate --applications x → --applications is 'x'
workload generate --applications wave:x → 'x' is not a number
workload generate --arguments wave → --arguments is 'wave'
workload generate --arguments "wave='a" → quote as for a shell
workload generate --estimate wave=x → 'x' is not a number
workload generate --run-times 5-1 → --run-times is '5-1'
workload generate --inputs a,,b → --inputs is
workload generate --field x → --field is 'x'
workload generate --field x={ → in YAML or JSON
workload generate --request fixed → --request is 'fixed'; give nonfixed or flexible
workload generate --rate 0 → --rate is 0
workload generate -o /nowhere/x → cannot write /nowhere/x
workload run /nowhere → cannot read /nowhere
workload run /dev/null → /dev/null is empty
workload run /dev/null --background 2 → --background
workload report /nowhere → cannot read /nowhere/report.json
nonsense → No such command 'nonsense'
"""
"""Commands with a part of the message, after the exit code if it is not 2."""
ROWS = [line.partition(" → ")[::2] for line in REJECTIONS.strip().splitlines()]
ROWS.append((f"submit --fixed north:{'9' * 5000} x", "--fixed is 'north:999"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(identities=administrators(TOKEN, store=memory_stores().tokens)) as server:
        yield server


@pytest.mark.parametrize(("command", "answer"), ROWS, ids=[command[:60] for command, _ in ROWS])
def test_rejection_is_one_line_and_changes_nothing(koala: Koala, server: Server, command: str, answer: str) -> None:
    if not server.service.records:
        assert koala("submit", "--flexible", "6", "--", "program").code == 0
    before = dict(server.service.records)
    code, message = (int(answer[0]), answer[3:]) if answer[1:3] == ": " else (2, answer)
    ended = koala(*shlex.split(command))
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith("koala: ")
    assert message in ended.err
    assert (ended.err.count("\n"), ";" in ended.err) == (1, True), "one line, with a hint"
    assert server.service.records == before
