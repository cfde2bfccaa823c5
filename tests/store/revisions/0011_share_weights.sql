-- What a daemon of revision 0011_share_weights left.
insert into "bundles" ("id", "size", "files", "used_at", "owners") values
('bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb', 12345, 3, 101.0, '[]');
insert into "clusters" ("name", "kind", "state", "reason", "total", "errors", "unusable", "last_heard", "note", "trials", "drained", "planned_drains") values
('north', 'slurm', 'usable', '', 16, 1, false, 99.0, '', 0, null, '[]'),
('south', 'sge', 'unusable', 'three errors', 8, 3, true, null, 'three errors', 2, '{"at": 7.0, "by": "ops", "reason": "new switch", "begins_at": null, "ends_at": null, "requeue": false}', '[]');
insert into "days" ("kind", "day", "name", "jobs", "succeeded", "failed", "cancelled", "restarts", "ran", "coallocated", "within_1m", "within_10m", "within_1h", "within_6h", "within_1d", "start_delays", "queue_time", "wait_time", "startup_overhead", "run_time", "response_time", "slowdown", "start_delay", "node_seconds", "coallocated_node_seconds", "nodes") values
('cluster', 0, 'north', 4, 2, 2, 0, 2, 4, 2, 4, 4, 4, 4, 4, 1, 3.0, 33.0, 40.0, 3665.0, 3698.0, 5.074205577815686, 2.0, 21805.5, 129.0, 16),
('cluster', 0, 'south', 2, 2, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 1, 2.0, 12.0, 20.0, 42.0, 54.0, 2.571428571428571, 2.0, 64.5, 64.5, 8),
('grid', 0, '', 5, 2, 2, 1, 2, 4, 2, 4, 4, 4, 4, 4, 1, 3.0, 33.0, 40.0, 3665.0, 3698.0, 5.074205577815686, 2.0, 21870.0, 193.5, 0),
('policy', 0, '', 3, 1, 1, 1, 0, 2, 1, 2, 2, 2, 2, 2, 0, 1.0, 11.0, 20.0, 43.0, 54.0, 2.5, 0.0, 129.0, 64.5, 0),
('policy', 0, 'auto', 2, 1, 1, 0, 2, 2, 1, 2, 2, 2, 2, 2, 1, 2.0, 22.0, 20.0, 3622.0, 3644.0, 2.574205577815686, 2.0, 21741.0, 129.0, 0),
('priority', 0, 'high', 2, 1, 1, 0, 2, 2, 1, 2, 2, 2, 2, 2, 1, 2.0, 22.0, 20.0, 3622.0, 3644.0, 2.574205577815686, 2.0, 21741.0, 129.0, 0),
('priority', 0, 'low', 3, 1, 1, 1, 0, 2, 1, 2, 2, 2, 2, 2, 0, 1.0, 11.0, 20.0, 43.0, 54.0, 2.5, 0.0, 129.0, 64.5, 0),
('site', 0, 'north', 2, 1, 1, 0, 2, 2, 1, 2, 2, 2, 2, 2, 1, 2.0, 22.0, 20.0, 3622.0, 3644.0, 2.574205577815686, 2.0, 21741.0, 129.0, 0),
('user', 0, 'ada', 2, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0.0, 0.0, 10.0, 21.0, 21.0, 1.0, 0.0, 64.5, 64.5, 0),
('user', 0, 'bob', 2, 1, 1, 0, 2, 2, 1, 2, 2, 2, 2, 2, 1, 2.0, 22.0, 20.0, 3622.0, 3644.0, 2.574205577815686, 2.0, 21741.0, 129.0, 0),
('user', 0, 'cyd', 1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 1.0, 11.0, 10.0, 22.0, 33.0, 1.5, 0.0, 64.5, 0.0, 0);
insert into "jobs" ("id", "name", "owner", "priority", "spec", "state", "reason", "ending", "queue_seq", "generation", "restarts", "placement_tries", "claiming_tries", "counted_scan", "submitted_at", "placed_at", "started_at", "ended_at", "exit_code", "claim_factor", "first_start_estimate", "retry_at", "refusals", "awaits", "eligible_at", "application", "tasks", "array_size", "array_job", "array_index", "internal", "home_site") values
(1, 'wave', 'ada', 'low', '{"request": {"type": "flexible", "total_size": 3, "min_component_size": 1, "max_components": null, "split_options": []}, "command": ["./wave", "-n", "3"], "name": "wave", "owner": "ada"}', 'queued', 'no cluster has 3 idle nodes', null, 101, 0, 0, 4, 0, 6, 101.0, null, null, null, null, null, null, null, null, null, null, 'wave', null, 0, null, null, false, ''),
(2, '', '', 'low', '{"request": {"type": "nonfixed", "components": [{"size": 2, "cluster": null, "command": null, "environment": [], "output": null, "error": null, "inputs": [], "cores": null, "memory": null, "gpus": null, "features": [], "partition": "", "account": "", "qos": "", "exclude": []}, {"size": 1, "cluster": null, "command": null, "environment": [], "output": null, "error": null, "inputs": [{"name": "climate/mesh", "size": 5000000000, "sites": ["west", "south"], "distribution": "whole", "part": null, "target": ""}], "cores": null, "memory": null, "gpus": null, "features": [], "partition": "", "account": "", "qos": "", "exclude": []}]}, "command": ["true"]}', 'held', 'held by ada', null, 102, 0, 0, 0, 0, 0, 102.0, null, null, null, null, null, null, null, null, null, null, 'true', null, 0, null, null, false, ''),
(3, '', 'cyd', 'low', '{"request": {"type": "fixed", "components": [{"size": 2, "cluster": "north", "command": ["ocean"], "environment": [["ROLE", "sea"]], "output": "/tmp/sea", "error": null, "inputs": [{"name": "climate/mesh", "size": 5000000000, "sites": ["west", "south"], "distribution": "whole", "part": null, "target": ""}], "cores": null, "memory": null, "gpus": null, "features": [], "partition": "", "account": "", "qos": "", "exclude": []}, {"size": 1, "cluster": "south", "command": ["air"], "environment": [], "output": null, "error": null, "inputs": [{"name": "fields", "size": 300, "sites": ["south"], "distribution": "partitioned", "part": "part-1", "target": "in"}, {"name": "climate/mesh", "size": 5000000000, "sites": ["west", "south"], "distribution": "whole", "part": null, "target": ""}], "cores": null, "memory": null, "gpus": null, "features": [], "partition": "", "account": "", "qos": "", "exclude": []}]}, "command": [], "owner": "cyd", "launcher": "processes"}', 'placed', '', null, 103, 1, 0, 1, 0, 0, 103.0, 110.0, null, null, null, null, null, null, null, null, null, 'ocean+air', null, 0, null, null, false, ''),
(4, 'poisson 1', 'bob', 'high', '{"request": {"type": "flexible", "total_size": 6, "min_component_size": 2, "max_components": 3, "split_options": [[4, 2], [2, 2, 2]]}, "command": ["python", "-m", "koalapy.apps.poisson", "gr\u00f6\u00dfe=1"], "policy": "auto", "coallocation": 2, "speed_ratio_min": 0.5, "claiming": "incremental", "claim_threshold": 0.75, "priority": "high", "processes_per_node": 4, "name": "poisson 1", "owner": "bob", "home_site": "north", "environment": [["OMP_NUM_THREADS", "2"], ["LANG", ""]], "walltime": 3600.0, "warning": {"signal": "USR1", "grace": 90.0}, "output": "{scratch}/out", "workdir": "/home/bob", "workdir_optional": true, "max_restarts": 2, "max_placement_tries": 50, "max_claiming_tries": 5, "retry_on_exit": [75, 137], "inputs": [{"name": "climate/mesh", "size": 5000000000, "sites": ["west", "south"], "distribution": "whole", "part": null, "target": ""}], "bundle": {"id": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "size": 12345, "files": 3}, "collect": ["*.dat", "log/*"], "application": "poisson", "communication": 0.25, "mail_type": ["begin", "fail"], "mail_user": "bob@example.org", "webhook": "https://hooks.example.org/bob"}', 'claiming', '', null, 104, 1, 0, 0, 2, 0, 104.0, 110.0, null, null, null, 0.625, null, null, null, null, null, 'poisson', null, 0, null, null, false, 'north'),
(5, 'wave', 'ada', 'low', '{"request": {"type": "flexible", "total_size": 3, "min_component_size": 1, "max_components": null, "split_options": []}, "command": ["./wave", "-n", "3"], "name": "wave", "owner": "ada"}', 'starting', '', null, 105, 1, 0, 0, 0, 0, 105.0, 110.0, 120.0, null, null, null, 116.0, null, null, null, null, 'wave', null, 0, null, null, false, ''),
(6, 'wave', 'ada', 'low', '{"request": {"type": "flexible", "total_size": 3, "min_component_size": 1, "max_components": null, "split_options": []}, "command": ["./wave", "-n", "3"], "name": "wave", "owner": "ada"}', 'running', '', null, 106, 2, 1, 0, 0, 0, 106.0, 110.0, 120.0, null, null, null, null, null, null, null, null, 'wave', null, 0, null, null, false, ''),
(7, 'wave', 'ada', 'low', '{"request": {"type": "flexible", "total_size": 3, "min_component_size": 1, "max_components": null, "split_options": []}, "command": ["./wave", "-n", "3"], "name": "wave", "owner": "ada"}', 'unknown', '', null, 107, 1, 0, 0, 0, 0, 107.0, 110.0, 120.0, null, null, null, null, null, null, null, null, 'wave', null, 0, null, null, false, ''),
(8, 'poisson 1', 'bob', 'high', '{"request": {"type": "flexible", "total_size": 6, "min_component_size": 2, "max_components": 3, "split_options": [[4, 2], [2, 2, 2]]}, "command": ["python", "-m", "koalapy.apps.poisson", "gr\u00f6\u00dfe=1"], "policy": "auto", "coallocation": 2, "speed_ratio_min": 0.5, "claiming": "incremental", "claim_threshold": 0.75, "priority": "high", "processes_per_node": 4, "name": "poisson 1", "owner": "bob", "home_site": "north", "environment": [["OMP_NUM_THREADS", "2"], ["LANG", ""]], "walltime": 3600.0, "warning": {"signal": "USR1", "grace": 90.0}, "output": "{scratch}/out", "workdir": "/home/bob", "workdir_optional": true, "max_restarts": 2, "max_placement_tries": 50, "max_claiming_tries": 5, "retry_on_exit": [75, 137], "inputs": [{"name": "climate/mesh", "size": 5000000000, "sites": ["west", "south"], "distribution": "whole", "part": null, "target": ""}], "bundle": {"id": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "size": 12345, "files": 3}, "collect": ["*.dat", "log/*"], "application": "poisson", "communication": 0.25, "mail_type": ["begin", "fail"], "mail_user": "bob@example.org", "webhook": "https://hooks.example.org/bob"}', 'succeeded', '', null, 108, 2, 0, 0, 0, 0, 108.0, 110.0, 120.0, 141.0, 0, null, 114.0, null, null, null, null, 'poisson', null, 0, null, null, false, 'north'),
(9, '', 'cyd', 'low', '{"request": {"type": "fixed", "components": [{"size": 2, "cluster": "north", "command": ["ocean"], "environment": [["ROLE", "sea"]], "output": "/tmp/sea", "error": null, "inputs": [{"name": "climate/mesh", "size": 5000000000, "sites": ["west", "south"], "distribution": "whole", "part": null, "target": ""}], "cores": null, "memory": null, "gpus": null, "features": [], "partition": "", "account": "", "qos": "", "exclude": []}, {"size": 1, "cluster": "south", "command": ["air"], "environment": [], "output": null, "error": null, "inputs": [{"name": "fields", "size": 300, "sites": ["south"], "distribution": "partitioned", "part": "part-1", "target": "in"}, {"name": "climate/mesh", "size": 5000000000, "sites": ["west", "south"], "distribution": "whole", "part": null, "target": ""}], "cores": null, "memory": null, "gpus": null, "features": [], "partition": "", "account": "", "qos": "", "exclude": []}]}, "command": [], "owner": "cyd", "launcher": "processes"}', 'failed', 'exit code', null, 109, 1, 0, 0, 0, 0, 109.0, 110.0, 120.0, 142.0, 4294967295, null, null, null, null, null, null, 'ocean+air', null, 0, null, null, false, ''),
(10, 'poisson 1', 'bob', 'high', '{"request": {"type": "flexible", "total_size": 6, "min_component_size": 2, "max_components": 3, "split_options": [[4, 2], [2, 2, 2]]}, "command": ["python", "-m", "koalapy.apps.poisson", "gr\u00f6\u00dfe=1"], "policy": "auto", "coallocation": 2, "speed_ratio_min": 0.5, "claiming": "incremental", "claim_threshold": 0.75, "priority": "high", "processes_per_node": 4, "name": "poisson 1", "owner": "bob", "home_site": "north", "environment": [["OMP_NUM_THREADS", "2"], ["LANG", ""]], "walltime": 3600.0, "warning": {"signal": "USR1", "grace": 90.0}, "output": "{scratch}/out", "workdir": "/home/bob", "workdir_optional": true, "max_restarts": 2, "max_placement_tries": 50, "max_claiming_tries": 5, "retry_on_exit": [75, 137], "inputs": [{"name": "climate/mesh", "size": 5000000000, "sites": ["west", "south"], "distribution": "whole", "part": null, "target": ""}], "bundle": {"id": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "size": 12345, "files": 3}, "collect": ["*.dat", "log/*"], "application": "poisson", "communication": 0.25, "mail_type": ["begin", "fail"], "mail_user": "bob@example.org", "webhook": "https://hooks.example.org/bob"}', 'failed', 'walltime', null, 110, 1, 2, 0, 0, 0, 110.0, 110.0, 120.0, 3721.0, null, null, null, null, null, null, null, 'poisson', null, 0, null, null, false, 'north'),
(11, 'wave', 'ada', 'low', '{"request": {"type": "flexible", "total_size": 3, "min_component_size": 1, "max_components": null, "split_options": []}, "command": ["./wave", "-n", "3"], "name": "wave", "owner": "ada"}', 'cancelled', 'by bob: not needed 🐨', null, 111, 0, 0, 0, 0, 0, 111.0, null, null, 130.0, null, null, null, null, null, null, null, 'wave', null, 0, null, null, false, ''),
(12, 'wave', 'ada', 'low', '{"request": {"type": "flexible", "total_size": 3, "min_component_size": 1, "max_components": null, "split_options": []}, "command": ["./wave", "-n", "3"], "name": "wave", "owner": "ada"}', 'queued', '', null, 112, 1, 1, 0, 0, 0, 112.0, null, null, null, null, null, null, 160.0, '[{"cluster": "north", "words": "no node hours left", "until": 160.0, "times": 2}, {"cluster": "south", "words": "too wide", "until": null, "times": 1}]', null, null, 'wave', null, 0, null, null, false, ''),
(13, 'network north-south', 'koala', 'low', '{"request": {"type": "fixed", "components": [{"size": 1, "cluster": "north", "command": null, "environment": [], "output": null, "error": null, "inputs": [], "cores": null, "memory": null, "gpus": null, "features": [], "partition": "", "account": "", "qos": "", "exclude": []}, {"size": 1, "cluster": "south", "command": null, "environment": [], "output": null, "error": null, "inputs": [], "cores": null, "memory": null, "gpus": null, "features": [], "partition": "", "account": "", "qos": "", "exclude": []}]}, "command": ["pingpong"], "name": "network north-south", "owner": "koala", "application": "-", "internal": true}', 'cancelled', '', null, 113, 0, 0, 0, 0, 0, 113.0, null, null, 131.0, null, null, null, null, null, null, null, '', null, 0, null, null, true, ''),
(14, 'wave', 'ada', 'low', '{"request": {"type": "flexible", "total_size": 3, "min_component_size": 1, "max_components": null, "split_options": []}, "command": ["./wave", "-n", "3"], "name": "wave", "owner": "ada"}', 'running', 'cancelled', 'cancelled', 114, 1, 0, 0, 0, 0, 114.0, 110.0, 120.0, null, null, null, null, null, null, null, null, 'wave', null, 0, null, null, false, '');
insert into "lease" ("id", "instance", "epoch", "holder", "expires_at", "batch", "last_job", "address") values
(1, '0123abcd', 1, 'elsewhere:1:1', 50.0, 3, 20, 'http://elsewhere:8000');
insert into "measurements" ("id", "one", "other", "kind", "at", "latency", "bandwidth", "job_id", "error", "back") values
(1, 'north', 'south', 'pingpong', 60.0, 0.25, 1000000.0, 13, '', 2000000.0),
(2, 'north', 'south', 'pingpong', 61.0, null, null, 13, 'no way', 2000000.0),
(3, 'south', 'north', 'transfer', 62.0, null, 3000000.0, null, '', null);
insert into "outbox" ("id", "cluster", "payload", "written_at") values
(11, 'north', '{"type": "submit", "token": "4.1.0", "id": 11, "nodes": 2}', 150.0),
(12, 'south', '{"type": "stop", "token": "14.1.0", "id": 12, "reason": "cancelled"}', 150.0);
insert into "queues" ("priority", "scans") values
('low', 9),
('high', 3);
insert into "use_sums" ("length", "start", "cluster", "samples", "ours", "local", "idle", "down", "withheld", "unknown", "queued", "started", "ended", "startup") values
(60, 600, '', 2, 12, 4, 16, 0, 0, 0, 4, 2, 2, 3.0),
(600, 600, '', 2, 12, 4, 16, 0, 0, 0, 4, 2, 2, 3.0),
(3600, 0, '', 2, 12, 4, 16, 0, 0, 0, 4, 2, 2, 3.0);
insert into "share_weights" ("user", "weight", "by", "reason", "at") values
('ada', 2.5, 'ops', 'paid for it', 95.0),
('bob', null, 'ops', '', 96.0);
insert into "skipped_jobs" ("first", "last") values
(18, 19);
insert into "replicas" ("name", "cluster", "path", "size", "checksum", "parts", "state", "reason", "added_at", "verified_at") values
('climate/mesh', 'south', '/data/mésh -x.nc', 5000000000, 'c0ffee', null, 'good', '', 1.5, 0.0),
('fields', 'south', '/data/f', 300, 'f1', '[["a b", 100, "aa"], ["\u00e9", 200, "bb"]]', 'good', '', 0.0, 0.0),
('fields', 'west', '/f', 300, 'f1', '[]', 'changed', '2 bytes, not 300', 1.5, 2.5);
insert into "runs" ("job_id", "run") values
(20, '{"application": "wave", "size": [3, 0], "clusters": ["north", "south"], "seconds": 20.0, "killed": false}');
insert into "advice" ("job_id", "generation", "application", "at", "clusters", "predicted", "options", "reason", "actual") values
(8, 2, 'poisson', 110.0, 2, 18.0, '[{"clusters": ["north", "south"], "slowdown": 1.5, "wait": 0.0, "transfer": 2.0, "run": 15.0}, {"clusters": ["north"], "slowdown": 1.0, "wait": null, "transfer": 0.0, "run": 10.0}]', 'co-allocated, since it pays', 20.0),
(10, 1, 'poisson', 110.0, 1, null, '[]', 'the only one', null);
insert into "attempts" ("job_id", "generation", "placed_at", "barrier_at", "launched_at", "ended_at", "exit_code", "end_reason", "start_estimate", "claim_at", "nonce") values
(6, 1, 110.0, null, null, 119.0, null, 'infrastructure-failure: node gone', 116.0, 115.5, '5eed1'),
(8, 2, 110.0, 120.0, 121.0, 140.0, 0, '', 116.0, 115.5, '5eed2'),
(3, 1, 110.0, null, null, null, null, '', 116.0, 115.5, '5eed1'),
(4, 1, 110.0, null, null, null, null, '', 116.0, 115.5, '5eed1'),
(5, 1, 110.0, 120.0, null, null, null, '', 116.0, 115.5, '5eed1'),
(7, 1, 110.0, 120.0, null, null, null, '', 116.0, 115.5, '5eed1'),
(9, 1, 110.0, 120.0, null, null, null, '', 116.0, 115.5, '5eed1'),
(10, 1, 110.0, 120.0, 120.5, 3720.5, null, 'walltime', 116.0, 115.5, '5eed1'),
(12, 1, 110.0, null, null, 119.0, null, 'infrastructure-failure: node gone', 116.0, 115.5, '5eed1'),
(14, 1, 110.0, 120.0, 121.0, null, null, '', 116.0, 115.5, '5eed1'),
(6, 2, 110.0, 120.0, 121.0, null, null, '', 116.0, 115.5, '5eed2');
insert into "components" ("job_id", "generation", "index", "cluster", "size", "state", "request_index", "hosts", "lrm_job", "exit_code", "error", "infrastructure", "unknown_since", "lease", "lost_at", "claimed_at", "ended_at", "submitted_at", "sources", "transfer_time", "replaces", "superseded", "staging_since", "stage_size", "staged", "staged_at", "warned_at", "node_class", "measured_nodes", "cpu_time", "cpu_available", "peak_memory") values
(6, 1, 0, 'north', 3, 'ended', null, '["127.0.1.1", "127.0.1.2"]', '7', null, 'node gone', true, null, null, null, 118.5, 119.0, 116.0, '[]', 0.0, null, false, null, 0, 0, null, null, '', 0, null, null, null),
(8, 2, 0, 'north', 4, 'ended', null, '["127.0.1.1", "127.0.1.2"]', '7', 0, '', false, null, null, null, 118.5, 140.0, 116.0, '["west", "north"]', 2.5, null, false, null, 0, 0, null, null, '', 0, null, null, null),
(8, 2, 1, 'west', 1, 'ended', null, '[]', null, null, 'lost', true, null, null, null, null, null, null, '[]', 0.0, null, true, null, 0, 0, null, null, '', 0, null, null, null),
(8, 2, 2, 'south', 2, 'ended', null, '["127.0.1.1", "127.0.1.2"]', '7', 0, '', false, null, null, null, 118.5, 140.0, 116.0, '[]', 0.0, 1, false, null, 300, 300, null, null, '', 0, null, null, null),
(3, 1, 0, 'north', 2, 'placed', 0, '[]', null, null, '', false, null, null, null, null, null, null, '["south"]', 0.0, null, false, null, 0, 0, null, null, '', 0, null, null, null),
(4, 1, 0, 'north', 2, 'waiting', null, '[]', '9', null, '', false, null, null, null, null, null, 116.0, '[]', 0.0, null, false, null, 0, 0, 115.0, null, '', 0, null, null, null),
(4, 1, 1, 'south', 1, 'submitted', 1, '[]', null, null, '', false, null, null, null, null, null, null, '[]', 0.0, null, false, 110.0, 0, 7, null, null, '', 0, null, null, null),
(5, 1, 0, 'north', 3, 'claimed', null, '["127.0.1.1", "127.0.1.2"]', '7', null, '', false, null, null, null, 118.5, null, 116.0, '[]', 0.0, null, false, null, 0, 0, null, null, '', 0, null, null, null),
(7, 1, 0, 'west', 3, 'running', null, '["127.0.1.1", "127.0.1.2"]', '7', null, '', false, 150.0, 2400.0, 2604.0, 118.5, null, 116.0, '[]', 0.0, null, false, null, 0, 0, null, null, '', 0, null, null, null),
(9, 1, 0, 'north', 3, 'ended', null, '["127.0.1.1", "127.0.1.2"]', '7', 4294967295, '', false, null, null, null, 118.5, 140.0, 116.0, '[]', 0.0, null, false, null, 0, 0, null, null, '', 0, null, null, null),
(10, 1, 0, 'north', 6, 'ended', null, '["127.0.1.1", "127.0.1.2"]', '7', null, '', false, null, null, null, 118.5, 3720.5, 116.0, '[]', 0.0, null, false, null, 0, 0, null, null, '', 0, null, null, null),
(12, 1, 0, 'north', 3, 'ended', null, '["127.0.1.1", "127.0.1.2"]', '7', null, 'node gone', true, null, null, null, 118.5, 119.0, 116.0, '[]', 0.0, null, false, null, 0, 0, null, null, '', 0, null, null, null),
(14, 1, 0, 'north', 3, 'delivering', null, '["127.0.1.1", "127.0.1.2"]', '7', 3, '', false, null, null, null, 118.5, null, 116.0, '[]', 0.0, null, false, null, 0, 0, null, null, '', 0, null, null, null),
(6, 2, 0, 'south', 3, 'running', null, '["127.0.1.1", "127.0.1.2"]', '7', null, '', false, null, null, null, 118.5, null, 116.0, '[]', 0.0, null, false, null, 0, 0, null, null, '', 0, null, null, null);
insert into "history" ("job_id", "ended_at", "owner", "name", "state", "clusters", "nodes", "wait_time", "run_time", "node_seconds", "measured_nodes", "cpu_time", "cpu_available", "peak_memory") values
(8, 141.0, 'bob', 'poisson 1', 'succeeded', '["north", "south"]', 6, 12.0, 20.0, 129.0, 0, null, null, null),
(9, 142.0, 'cyd', '', 'failed', '["north"]', 3, 11.0, 22.0, 64.5, 0, null, null, null),
(10, 3721.0, 'bob', 'poisson 1', 'failed', '["north"]', 6, 10.0, 3600.5, 21612.0, 0, null, null, null),
(11, 130.0, 'ada', 'wave', 'cancelled', '[]', 0, null, null, 0.0, 0, null, null, null);
insert into "history_clusters" ("job_id", "cluster", "ended_at") values
(8, 'north', 141.0),
(8, 'south', 141.0),
(9, 'north', 142.0),
(10, 'north', 3721.0);
insert into "results" ("job_id", "generation", "rank", "cluster", "size", "files", "at") values
(8, 2, 0, 'north', 4096, 2, 141.5),
(8, 2, 2, 'south', 0, 1, 141.5);
insert into "submissions" ("key", "job_id", "digest", "at") values
('ba620f687a7962b9839bbb77c3287d980af1e36eafad4b88dfa229af1bf91b1a', 1, 'bb0a4d4592570019dd227a44a412a377d282731e4fb630c654f656e1f32ac5ad', 150.0),
('e04e8b0c3f65c4a1138f1551efa52c7712616d155d1cd27f721878336e0f851a', 8, 'bcb84e56a32cc9e14a9bc768bad38e6fd1e51d30bce5722ad061e4ca3722eba5', 150.0),
('894ded77a4187b2b8493d6d84d28304ac0ba580dcd34a3856eb423c4ff1aebe8', 9, 'f8aef96a5ca2f0f4d9cdcf8208679ba0dabdb50e0938878b321a6c88260b1c2a', 150.0);
insert into "timeline" ("id", "job_id", "at", "event", "state", "reason", "generation", "component", "cluster", "actor") values
(1, 1, 101.0, 'submitted', 'queued', '', 0, null, null, ''),
(2, 2, 102.0, 'submitted', 'queued', '', 0, null, null, ''),
(3, 3, 103.0, 'submitted', 'queued', '', 0, null, null, ''),
(4, 4, 104.0, 'submitted', 'queued', '', 0, null, null, ''),
(5, 5, 105.0, 'submitted', 'queued', '', 0, null, null, ''),
(6, 6, 106.0, 'submitted', 'queued', '', 0, null, null, ''),
(7, 7, 107.0, 'submitted', 'queued', '', 0, null, null, ''),
(8, 8, 108.0, 'submitted', 'queued', '', 0, null, null, ''),
(9, 9, 109.0, 'submitted', 'queued', '', 0, null, null, ''),
(10, 10, 110.0, 'submitted', 'queued', '', 0, null, null, ''),
(11, 11, 111.0, 'submitted', 'queued', '', 0, null, null, ''),
(12, 12, 112.0, 'submitted', 'queued', '', 0, null, null, ''),
(13, 13, 113.0, 'submitted', 'queued', '', 0, null, null, ''),
(14, 14, 114.0, 'submitted', 'queued', '', 0, null, null, ''),
(16, 6, 119.0, 'ended', 'queued', 'node gone', 1, 0, 'north', '');
insert into "reservations" ("id", "name", "site_name", "owner", "begins_at", "ends_at", "parts", "changed_at", "users", "state", "reason") values (7, 'lecture', 'koala-0123abcd0000-7', 'ada', 5000.0, 6000.0, '[{"cluster": "north", "nodes": 2}]', 900.5, '["bob"]', 'made', '');
