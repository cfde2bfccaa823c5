-- What a daemon of revision 0002 left.
insert into "clusters" ("name", "kind", "state", "reason", "total", "errors", "unusable", "last_heard", "note", "trials", "drained_at", "drained_by", "drained_reason") values
('north', 'slurm', 'usable', '', 16, 1, false, 99.0, '', 0, null, null, null),
('south', 'sge', 'unusable', 'three errors', 8, 3, true, null, 'three errors', 2, 7.0, 'ops', 'new switch');
insert into "jobs" ("id", "name", "owner", "priority", "spec", "state", "reason", "ending", "queue_seq", "generation", "restarts", "placement_tries", "claiming_tries", "submitted_at", "placed_at", "started_at", "ended_at", "exit_code", "claim_factor", "first_start_estimate") values
(1, 'wave', 'ada', 'low', '{"request":{"type":"flexible","total_size":3,"min_component_size":1,"max_components":null,"split_options":[]},"command":["./wave","-n","3"],"name":"wave","owner":"ada"}', 'queued', 'no cluster has 3 idle nodes', null, 101, 0, 0, 4, 0, 101.0, null, null, null, null, null, null),
(2, '', '', 'low', '{"request":{"type":"nonfixed","components":[{"size":2,"cluster":null,"command":null,"environment":[],"output":null,"input":null},{"size":1,"cluster":null,"command":null,"environment":[],"output":null,"input":{"name":"climate/mesh","size":5000000000,"sites":["west","south"]}}]},"command":["true"]}', 'held', 'held by ada', null, 102, 0, 0, 0, 0, 102.0, null, null, null, null, null, null),
(3, '', 'cyd', 'low', '{"request":{"type":"fixed","components":[{"size":2,"cluster":"north","command":["ocean"],"environment":[["ROLE","sea"]],"output":"/tmp/sea","input":{"name":"climate/mesh","size":5000000000,"sites":["west","south"]}},{"size":1,"cluster":"south","command":["air"],"environment":[],"output":null,"input":{"name":"fields","size":300,"sites":["south"]}}]},"command":[],"owner":"cyd","launcher":"processes"}', 'placed', '', null, 103, 1, 0, 1, 0, 103.0, 110.0, null, null, null, null, null),
(4, 'poisson 1', 'bob', 'high', '{"request":{"type":"flexible","total_size":6,"min_component_size":2,"max_components":3,"split_options":[[4,2],[2,2,2]]},"command":["python","-m","koalapy.apps.poisson","gr\u00f6\u00dfe=1"],"name":"poisson 1","owner":"bob","priority":"high","policy":"auto","coallocation":2,"speed_ratio_min":0.5,"claiming":"incremental","claim_threshold":0.75,"processes_per_node":4,"workdir":"/home/bob","output":"{scratch}/out","walltime":3600.0,"max_restarts":2,"max_placement_tries":50,"max_claiming_tries":5,"environment":[["OMP_NUM_THREADS","2"],["LANG",""]],"retry_on_exit":[75,137]}', 'claiming', '', null, 104, 1, 0, 0, 2, 104.0, 110.0, null, null, null, 0.625, null),
(5, 'wave', 'ada', 'low', '{"request":{"type":"flexible","total_size":3,"min_component_size":1,"max_components":null,"split_options":[]},"command":["./wave","-n","3"],"name":"wave","owner":"ada"}', 'starting', '', null, 105, 1, 0, 0, 0, 105.0, 110.0, 120.0, null, null, null, 116.0),
(6, 'wave', 'ada', 'low', '{"request":{"type":"flexible","total_size":3,"min_component_size":1,"max_components":null,"split_options":[]},"command":["./wave","-n","3"],"name":"wave","owner":"ada"}', 'running', '', null, 106, 2, 1, 0, 0, 106.0, 110.0, 120.0, null, null, null, null),
(7, 'wave', 'ada', 'low', '{"request":{"type":"flexible","total_size":3,"min_component_size":1,"max_components":null,"split_options":[]},"command":["./wave","-n","3"],"name":"wave","owner":"ada"}', 'unknown', '', null, 107, 1, 0, 0, 0, 107.0, 110.0, 120.0, null, null, null, null),
(8, 'poisson 1', 'bob', 'high', '{"request":{"type":"flexible","total_size":6,"min_component_size":2,"max_components":3,"split_options":[[4,2],[2,2,2]]},"command":["python","-m","koalapy.apps.poisson","gr\u00f6\u00dfe=1"],"name":"poisson 1","owner":"bob","priority":"high","policy":"auto","coallocation":2,"speed_ratio_min":0.5,"claiming":"incremental","claim_threshold":0.75,"processes_per_node":4,"workdir":"/home/bob","output":"{scratch}/out","walltime":3600.0,"max_restarts":2,"max_placement_tries":50,"max_claiming_tries":5,"environment":[["OMP_NUM_THREADS","2"],["LANG",""]],"retry_on_exit":[75,137]}', 'succeeded', '', null, 108, 2, 0, 0, 0, 108.0, 110.0, 120.0, 141.0, 0, null, 114.0),
(9, '', 'cyd', 'low', '{"request":{"type":"fixed","components":[{"size":2,"cluster":"north","command":["ocean"],"environment":[["ROLE","sea"]],"output":"/tmp/sea","input":{"name":"climate/mesh","size":5000000000,"sites":["west","south"]}},{"size":1,"cluster":"south","command":["air"],"environment":[],"output":null,"input":{"name":"fields","size":300,"sites":["south"]}}]},"command":[],"owner":"cyd","launcher":"processes"}', 'failed', 'exit code', null, 109, 1, 0, 0, 0, 109.0, 110.0, 120.0, 142.0, 1, null, null),
(10, 'poisson 1', 'bob', 'high', '{"request":{"type":"flexible","total_size":6,"min_component_size":2,"max_components":3,"split_options":[[4,2],[2,2,2]]},"command":["python","-m","koalapy.apps.poisson","gr\u00f6\u00dfe=1"],"name":"poisson 1","owner":"bob","priority":"high","policy":"auto","coallocation":2,"speed_ratio_min":0.5,"claiming":"incremental","claim_threshold":0.75,"processes_per_node":4,"workdir":"/home/bob","output":"{scratch}/out","walltime":3600.0,"max_restarts":2,"max_placement_tries":50,"max_claiming_tries":5,"environment":[["OMP_NUM_THREADS","2"],["LANG",""]],"retry_on_exit":[75,137]}', 'failed', 'walltime', null, 110, 1, 2, 0, 0, 110.0, 110.0, 120.0, 3721.0, null, null, null),
(11, 'wave', 'ada', 'low', '{"request":{"type":"flexible","total_size":3,"min_component_size":1,"max_components":null,"split_options":[]},"command":["./wave","-n","3"],"name":"wave","owner":"ada"}', 'cancelled', 'by bob: not needed 🐨', null, 111, 0, 0, 0, 0, 111.0, null, null, 130.0, null, null, null),
(12, 'wave', 'ada', 'low', '{"request":{"type":"flexible","total_size":3,"min_component_size":1,"max_components":null,"split_options":[]},"command":["./wave","-n","3"],"name":"wave","owner":"ada"}', 'queued', '', null, 112, 1, 1, 0, 0, 112.0, null, null, null, null, null, null),
(14, 'wave', 'ada', 'low', '{"request":{"type":"flexible","total_size":3,"min_component_size":1,"max_components":null,"split_options":[]},"command":["./wave","-n","3"],"name":"wave","owner":"ada"}', 'running', 'cancelled', 'cancelled', 114, 1, 0, 0, 0, 114.0, 110.0, 120.0, null, null, null, null),
(20, 'wave', 'ada', 'low', '{"request":{"type":"flexible","total_size":3,"min_component_size":1,"max_components":null,"split_options":[]},"command":["./wave","-n","3"],"name":"wave","owner":"ada"}', 'succeeded', '', null, 120, 2, 0, 0, 0, 120.0, 110.0, 120.0, 141.0, 0, null, null);
insert into "lease" ("id", "instance", "epoch", "holder", "expires_at") values
(1, '0123abcd', 1, 'elsewhere:1:1', 50.0);
insert into "links" ("source", "target", "measured_at", "latency", "bandwidth") values
('north', 'south', 60.0, 0.25, 1000000.0);
insert into "outbox" ("id", "cluster", "payload", "written_at") values
(11, 'north', '{"type":"submit","token":"4.1.0","id":11,"nodes":2}', 150.0),
(12, 'south', '{"type":"stop","token":"14.1.0","id":12,"reason":"cancelled"}', 150.0);
insert into "attempts" ("job_id", "generation", "placed_at", "barrier_at", "launched_at", "ended_at", "exit_code", "end_reason", "start_estimate", "claim_at") values
(6, 1, 110.0, null, null, 119.0, null, 'infrastructure-failure: node gone', 116.0, 115.5),
(8, 2, 110.0, 120.0, 121.0, 140.0, 0, '', 116.0, 115.5),
(20, 2, 110.0, 120.0, 121.0, 140.0, 0, '', 116.0, 115.5),
(3, 1, 110.0, null, null, null, null, '', 116.0, 115.5),
(4, 1, 110.0, null, null, null, null, '', 116.0, 115.5),
(5, 1, 110.0, 120.0, null, null, null, '', 116.0, 115.5),
(7, 1, 110.0, 120.0, null, null, null, '', 116.0, 115.5),
(9, 1, 110.0, 120.0, null, null, null, '', 116.0, 115.5),
(10, 1, 110.0, 120.0, 120.5, 3720.5, null, 'walltime', 116.0, 115.5),
(12, 1, 110.0, null, null, 119.0, null, 'infrastructure-failure: node gone', 116.0, 115.5),
(14, 1, 110.0, 120.0, 121.0, null, null, '', 116.0, 115.5),
(6, 2, 110.0, 120.0, 121.0, null, null, '', 116.0, 115.5);
insert into "components" ("job_id", "generation", "index", "cluster", "size", "state", "request_index", "hosts", "lrm_job", "exit_code", "error", "infrastructure", "unknown_since", "claimed_at", "ended_at", "submitted_at", "file_site", "transfer_time", "replaces", "superseded") values
(6, 1, 0, 'north', 3, 'ended', null, '["127.0.1.1","127.0.1.2"]', '7', null, 'node gone', true, null, 118.5, 119.0, 116.0, null, 0.0, null, false),
(8, 2, 0, 'north', 4, 'ended', null, '["127.0.1.1","127.0.1.2"]', '7', 0, '', false, null, 118.5, 140.0, 116.0, null, 2.5, null, false),
(8, 2, 1, 'west', 1, 'ended', null, '[]', null, null, 'lost', true, null, null, null, null, null, 0.0, null, true),
(8, 2, 2, 'south', 2, 'ended', null, '["127.0.1.1","127.0.1.2"]', '7', 0, '', false, null, 118.5, 140.0, 116.0, null, 0.0, 1, false),
(20, 2, 0, 'north', 2, 'ended', null, '["127.0.1.1","127.0.1.2"]', '7', 0, '', false, null, 118.5, 140.0, 116.0, null, 2.5, null, false),
(20, 2, 1, 'west', 1, 'ended', null, '[]', null, null, 'lost', true, null, null, null, null, null, 0.0, null, true),
(20, 2, 2, 'south', 1, 'ended', null, '["127.0.1.1","127.0.1.2"]', '7', 0, '', false, null, 118.5, 140.0, 116.0, null, 0.0, 1, false),
(3, 1, 0, 'north', 2, 'placed', 0, '[]', null, null, '', false, null, null, null, null, null, 0.0, null, false),
(4, 1, 0, 'north', 2, 'waiting', null, '[]', '9', null, '', false, null, null, null, 116.0, null, 0.0, null, false),
(4, 1, 1, 'south', 1, 'submitted', 1, '[]', null, null, '', false, null, null, null, null, null, 0.0, null, false),
(5, 1, 0, 'north', 3, 'claimed', null, '["127.0.1.1","127.0.1.2"]', '7', null, '', false, null, 118.5, null, 116.0, null, 0.0, null, false),
(7, 1, 0, 'west', 3, 'running', null, '["127.0.1.1","127.0.1.2"]', '7', null, '', false, 150.0, 118.5, null, 116.0, null, 0.0, null, false),
(9, 1, 0, 'north', 3, 'ended', null, '["127.0.1.1","127.0.1.2"]', '7', 1, '', false, null, 118.5, 140.0, 116.0, null, 0.0, null, false),
(10, 1, 0, 'north', 6, 'ended', null, '["127.0.1.1","127.0.1.2"]', '7', null, '', false, null, 118.5, 3720.5, 116.0, null, 0.0, null, false),
(12, 1, 0, 'north', 3, 'ended', null, '["127.0.1.1","127.0.1.2"]', '7', null, 'node gone', true, null, 118.5, 119.0, 116.0, null, 0.0, null, false),
(14, 1, 0, 'north', 3, 'stopping', null, '["127.0.1.1","127.0.1.2"]', '7', 3, '', false, null, 118.5, null, 116.0, null, 0.0, null, false),
(6, 2, 0, 'south', 3, 'running', null, '["127.0.1.1","127.0.1.2"]', '7', null, '', false, null, 118.5, null, 116.0, null, 0.0, null, false);
insert into "output" ("job_id", "generation", "component", "offset", "data") values
(8, 2, 0, 0, X'303132333435363738390a303132333435363738390a303132333435363738390a303132333435363738390a303132333435363738390a303132333435363738390a303132333435363738390a303132333435363738390a303132333435363738390a'),
(8, 2, 2, 0, X'00ff'),
(6, 1, 0, 0, X'6f66207468652066697273740a');
insert into "submissions" ("key", "job_id", "digest", "at") values
('key of 1', 1, '4560f47ac60428a4a25aead1e67eb22662af295d34e1079353dfedc9ac2d3d3d', 150.0),
('key of 8', 8, '09cc4d4413846ee9cff36ea4260af9c655b5b6bd6fead5aa156377f658c69d08', 150.0),
('key of 9', 9, 'c713e823af84223992bd2190736c45b87c34cd1126976c0d56ce97aeb73401a0', 150.0);
insert into "timeline" ("id", "job_id", "at", "event", "state", "reason", "generation", "component", "cluster") values
(1, 1, 101.0, 'submitted', 'queued', '', 0, null, null),
(2, 2, 102.0, 'submitted', 'queued', '', 0, null, null),
(3, 3, 103.0, 'submitted', 'queued', '', 0, null, null),
(4, 4, 104.0, 'submitted', 'queued', '', 0, null, null),
(5, 5, 105.0, 'submitted', 'queued', '', 0, null, null),
(6, 6, 106.0, 'submitted', 'queued', '', 0, null, null),
(7, 7, 107.0, 'submitted', 'queued', '', 0, null, null),
(8, 8, 108.0, 'submitted', 'queued', '', 0, null, null),
(9, 9, 109.0, 'submitted', 'queued', '', 0, null, null),
(10, 10, 110.0, 'submitted', 'queued', '', 0, null, null),
(11, 11, 111.0, 'submitted', 'queued', '', 0, null, null),
(12, 12, 112.0, 'submitted', 'queued', '', 0, null, null),
(13, 14, 114.0, 'submitted', 'queued', '', 0, null, null),
(14, 20, 120.0, 'submitted', 'queued', '', 0, null, null),
(15, 6, 119.0, 'ended', 'queued', 'node gone', 1, 0, 'north');
