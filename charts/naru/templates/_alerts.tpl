{{/* Alerts on metrics of `docs/metrics.md`: root, rule. `{{` in an annotation is Prometheus' own. */}}
{{- define "naru.alerts" -}}
{{- $own := printf "namespace=%q" .root.Release.Namespace -}}
{{- $workers := ternary "" (printf "namespace=~%q" (include "naru.namespaces" .root | fromJsonArray | join "|")) (eq (include "naru.isClusterWide" .root) "true") -}}
{{- $and := ternary "" "," (eq $workers "") -}}
- alert: NaruNoOperatorActs
  expr: sum(naru_operator_is_leader{ {{- $own -}} }) == 0
  for: 2m
  labels: {severity: warning}
  annotations:
    summary: No operator holds the lease.
    description: Models and pools are served as they are; changes to them are not carried out.
- alert: NaruOperatorIsStuck
  expr: naru_operator_loop_silence_seconds{ {{- $own -}} } > 120
  for: 2m
  labels: {severity: warning}
  annotations:
    summary: The operator's control loop stands still.
    description: {{ `Operator {{ $labels.pod }} has not looked at anything for {{ $value | humanizeDuration }}.` | quote }}
- alert: NaruRouteMapUnreadable
  expr: naru_router_registry_up{ {{- $own -}} } == 0
  for: 2m
  labels: {severity: warning}
  annotations:
    summary: A router cannot read the route map.
    description: {{ `Router {{ $labels.pod }} cannot reach Redis. It serves by the last route map: new workers and models are unknown to it.` | quote }}
- alert: NaruRequestsFail
  expr: >-
    sum by (model) (rate(naru_router_requests_total{ {{- $own }},status=~"5.."}[5m]))
    / sum by (model) (rate(naru_router_requests_total{ {{- $own -}} }[5m])) > {{ .rule.errorRatio }}
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: Requests to a model fail.
    description: {{ `{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} fail with 5xx.` | quote }}
- alert: NaruFirstTokenIsLate
  expr: >-
    histogram_quantile(0.95, sum by (model, le)
    (rate(naru_router_time_to_first_token_seconds_bucket{ {{- $own -}} }[5m]))) > {{ .rule.firstTokenSeconds }}
  for: 10m
  labels: {severity: warning}
  annotations:
    summary: First tokens of a model are late.
    description: {{ `One request of twenty to {{ $labels.model }} waits {{ $value | humanizeDuration }} for its first token.` | quote }}
- alert: NaruWorkerStreamsBreak
  expr: sum(increase(naru_router_worker_stream_losses_total{ {{- $own -}} }[10m])) > 5
  labels: {severity: warning}
  annotations:
    summary: Streams between routers and workers break.
    description: Workers crash or the network between them and the routers is bad.
- alert: NaruWorkerDoesNotServe
  expr: naru_worker_serving{ {{- $workers -}} } == 0
  for: 5m
  labels: {severity: critical}
  annotations:
    summary: A worker does not serve.
    description: {{ `Worker {{ $labels.pod }} has said for five minutes that it does not serve.` | quote }}
- alert: NaruModelLoadsFail
  expr: increase(naru_worker_model_load_failures_total{ {{- $workers -}} }[15m]) > 2
  labels: {severity: warning}
  annotations:
    summary: Loads of models fail.
    description: {{ `Loads fail again and again on worker {{ $labels.pod }}. The ModelDeployment's status says why.` | quote }}
- alert: NaruModelsThrash
  expr: rate(naru_worker_model_evictions_total{ {{- $workers -}} }[15m]) * 60 > 6
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: Models push one another out.
    description: {{ `Worker {{ $labels.pod }} evicts {{ $value | humanize }} models a minute: the pool is too small for what is asked of it.` | quote }}
- alert: NaruWorkerMemoryIsFull
  expr: >-
    sum by (namespace, pod) (naru_worker_memory_bytes{kind!="host"{{ $and }}{{ $workers }}})
    / on (namespace, pod) naru_worker_memory_budget_bytes{ {{- $workers -}} } > 0.95
  for: 30m
  labels: {severity: warning}
  annotations:
    summary: A worker's memory is full.
    description: {{ `{{ $value | humanizePercentage }} of the budget of worker {{ $labels.pod }} is booked. Loads wait for room.` | quote }}
- alert: NaruSequencesArePreempted
  expr: sum by (namespace, pod, model) (rate(naru_num_preemptions_total{ {{- $workers -}} }[10m])) > 0.2
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: Sequences lose their KV blocks.
    description: {{ `{{ $labels.model }} on {{ $labels.pod }} has too little KV cache: raise resources.kvCache.max or add copies.` | quote }}
- alert: NaruEngineStepsFail
  expr: increase(naru_engine_failed_steps_total{ {{- $workers -}} }[10m]) > 0
  labels: {severity: critical}
  annotations:
    summary: Steps of an engine fail.
    description: {{ `Steps of {{ $labels.model }} on {{ $labels.pod }} fail; its log says why.` | quote }}
{{- end -}}
