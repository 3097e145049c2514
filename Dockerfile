# The page and the HTTP API with the bundled model, on a CPU:
#   docker build -t difflm . && docker run -p 8000:8000 -e DIFFLM_TOKEN=WORD difflm
# Other models: mount a run and name it, such as -v $PWD/run:/run/mine difflm e2e /run/mine
FROM python:3.12-slim
WORKDIR /difflm
COPY pyproject.toml home_links.py README.md LICENSE LICENSE-WEIGHTS constraints.txt ./
COPY src src
COPY models models
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu '.[studio]' ./models/english \
 && useradd --create-home difflm
USER difflm
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["difflm", "studio", "--host", "0.0.0.0", "--port", "8000", "--no-browser"]
CMD ["e2e"]
