{{/* What the operator gives every worker pod: the file it reads, in the shapes of the Kubernetes API. */}}
{{- define "naru.workerTemplate" -}}
{{- $worker := .Values.worker -}}
{{- $template := dict
  "labels" $worker.podLabels
  "annotations" (mergeOverwrite (dict) (deepCopy $worker.podAnnotations) (dict "checksum/redis" (include "naru.redis.checksum" .)))
  "imagePullSecrets" ($worker.imagePullSecrets | default .Values.imagePullSecrets)
  "nodeSelector" $worker.nodeSelector
  "tolerations" $worker.tolerations
  "affinity" $worker.affinity
  "topologySpreadConstraints" $worker.topologySpreadConstraints
  "priorityClassName" $worker.priorityClassName
  "runtimeClassName" $worker.runtimeClassName
  "env" (concat (list (dict "name" "NARU_WORKER_LOG_LEVEL" "value" $worker.logLevel)) $worker.extraEnv)
  "volumes" $worker.extraVolumes
  "volumeMounts" $worker.extraVolumeMounts
  "resources" $worker.resources
  "terminationGracePeriodSeconds" $worker.terminationGracePeriodSeconds
  "podSecurityContext" $worker.podSecurityContext
  "securityContext" $worker.securityContext
-}}
{{- $probes := dict -}}
{{- range $name, $probe := $worker.probes }}{{ with $probe }}{{ $_ := set $probes $name . }}{{ end }}{{ end -}}
{{- $_ := set $template "probes" $probes -}}
{{- range $name, $value := $template }}{{ if not $value }}{{ $_ := unset $template $name }}{{ end }}{{ end -}}
{{- toYaml $template -}}
{{- end -}}
