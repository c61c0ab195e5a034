{{- /* Labels of a component that select its pods: (list ROOT COMPONENT) */ -}}
{{- define "memwal.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: memwal, app.kubernetes.io/instance: {{ $root.Release.Name }}, app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- /* Metadata of an object: (list ROOT NAME COMPONENT), or (list ROOT NAME COMPONENT LABELS) */ -}}
{{- define "memwal.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
  namespace: {{ $root.Release.Namespace }}
  labels: { {{ include "memwal.selector" (list $root (index . 2)) }}
  {{- range $key, $value := (last .) | kindIs "map" | ternary (last .) dict }}, {{ $key }}: {{ quote $value }}{{ end }} }
{{- end -}}

{{- define "memwal.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary .Release.Name "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- /* The endpoint of a pod: (list ROOT POD) */ -}}
{{- define "memwal.endpoint" -}}
{{- $root := index . 0 -}}
grpc+tls://{{ index . 1 }}.{{ $root.Release.Name }}.{{ $root.Release.Namespace }}.svc:{{ $root.Values.settings.daemon.port }}
{{- end -}}

{{- /* Seconds from SIGTERM to SIGKILL: daemon.drain_timeout, then 70 s in which other daemons take the regions, or Spark
ends. */ -}}
{{- define "memwal.grace" -}}
{{- $drain := .Values.settings.daemon.drain_timeout -}}
{{- $unit := regexFind "[a-z]+$" $drain -}}
{{- $seconds := mulf (trimSuffix $unit $drain | float64) (get (dict "ms" 0.001 "s" 1 "min" 60 "h" 3600) $unit) -}}
{{- add 70 (ceil $seconds) -}}
{{- end -}}

{{- /* settings, and the endpoints of the daemons, as variables. */ -}}
{{- define "memwal.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- if not $settings.daemon.endpoints -}}
  {{- $endpoints := list -}}
  {{- range $ordinal := until (int .Values.daemon.replicas) -}}
    {{- $endpoints = append $endpoints (include "memwal.endpoint" (list $ (printf "%s-%d" $.Release.Name $ordinal))) -}}
  {{- end -}}
  {{- $_ := set $settings.daemon "endpoints" $endpoints -}}
{{- end -}}
{{- range $section, $keys := $settings }}
{{- range $key, $value := $keys }}
- name: {{ printf "MEMWAL__%s__%s" $section $key | upper }}
  value: '{{ ternary $value (toRawJson $value) (kindIs "string" $value) | replace "'" "''" }}'
{{- end }}
{{- end }}
{{- end -}}

{{- /* The pods of a component: (dict "root" ROOT "component" COMPONENT "values" VALUES "command" COMMAND). */ -}}
{{- define "memwal.pod" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $serves := eq .component "daemon" -}}
{{- $settings := $root.Values.settings -}}
{{- $image := $root.Values.image -}}
metadata:
  labels: { {{ include "memwal.selector" (list $root .component) }} }
  {{- $annotations := deepCopy $values.podAnnotations }}
  {{- if not $root.Values.existingConfigMap }}
  {{- $_ := set $annotations "checksum/config" (sha256sum $root.Values.config) }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # SIGTERM lets other daemons take the regions, or ends the micro-batch that is under way, and Spark.
  terminationGracePeriodSeconds: {{ include "memwal.grace" $root }}
  serviceAccountName: {{ include "memwal.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: { type: RuntimeDefault }
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
  {{- with get $values $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - {{ toYaml . | nindent 6 | trim }}
      labelSelector:
        matchLabels: { {{ include "memwal.selector" (list $root "daemon") }} }
    {{- end }}
  {{- end }}
  {{- with $image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: memwal
      image: {{ with $image.registry }}{{ . }}/{{ end }}memwal-{{ .component }}:{{ $values.tag | default $root.Chart.AppVersion }}
      imagePullPolicy: {{ $image.pullPolicy }}
      args: [{{ .command }}, /etc/memwal/memwal.toml]
      env:
        {{- if $serves }}
        - name: POD_NAME
          valueFrom: { fieldRef: { fieldPath: metadata.name } }
        - name: MEMWAL__DAEMON__ADVERTISE
          value: {{ include "memwal.endpoint" (list $root "$(POD_NAME)") }}
        {{- end }}
        {{- include "memwal.settings" $root | trim | nindent 8 }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- if $serves }}
        - { name: flight, containerPort: {{ $settings.daemon.port }} }
        {{- end }}
        - { name: http, containerPort: {{ ternary $settings.daemon.http_port $settings.sink.http_port $serves }} }
      # A probe cannot send the token. Without one, /health/readyz tells only whether the process is ready.
      startupProbe:
        httpGet: { path: /health/livez, port: http, scheme: HTTPS }
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet: { path: /health/livez, port: http, scheme: HTTPS }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: { path: /health/readyz, port: http, scheme: HTTPS }
        periodSeconds: 5
        timeoutSeconds: 6
        failureThreshold: 2
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: { drop: [ALL] }
      volumeMounts:
        - { name: config, mountPath: /etc/memwal, readOnly: true }
        - { name: secrets, mountPath: /run/secrets/memwal, readOnly: true }
        - { name: tls, mountPath: /run/secrets/memwal-tls, readOnly: true }
        {{- if not $serves }}
        - { name: checkpoint, mountPath: /var/lib/memwal }
        {{- end }}
        - { name: tmp, mountPath: /tmp }
  volumes:
    - name: config
      configMap: { name: {{ $root.Values.existingConfigMap | default $root.Release.Name }} }
    - name: secrets
      secret: { secretName: {{ $root.Values.secrets.name }}, defaultMode: 0440 }
    - name: tls
      secret: { secretName: {{ $root.Values.secrets.tls }}, defaultMode: 0440 }
    {{- if not $serves }}
    - name: checkpoint
      persistentVolumeClaim: { claimName: {{ $values.checkpoint.existingClaim | default (printf "%s-checkpoint" $root.Release.Name) }} }
    {{- end }}
    - name: tmp
      emptyDir: {}
{{- end -}}
